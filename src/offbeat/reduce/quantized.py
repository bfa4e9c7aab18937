"""Values rounded to whole numbers of a few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Vector
from offbeat.reduce.codec import BlockCodec
from offbeat.reduce.two_phase import TwoPhaseMean


@dataclass(frozen=True, repr=False)
class Quantized(Code):
    """Blocks of `block` values as whole numbers of 8 or 4 bits times one scale, max|x|/(2^(bits−1) − 1).

    Smaller blocks lose less and send more scales, 4 bytes each. `stochastic` rounds at random, so that the
    error is zero on average; the draws depend on `seed`, round and rank. Sums are float32.

        offbeat.diloco(model, optimizer, reduce=Quantized(8))
    """

    bits: int = 8
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.bits, int) or self.bits not in (4, 8):
            raise ValueError(f"{self!r}: bits must be 8 or 4.")
        if (
            isinstance(self.block, bool)
            or not isinstance(self.block, int)
            or self.block < 8
            or self.block % 8
        ):
            raise ValueError(f"{self!r}: block must be a multiple of 8.")

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Pending[None]:
        def rng(way: str) -> torch.Generator | None:
            if not self.stochastic:
                return None
            key = (self.seed, clock.step, clock.round, vector.spans[0].name, comm.rank, way)
            return torch.Generator(vector.values.device).manual_seed(whole(*key) % 2**63)

        return TwoPhaseMean(vector, comm, BlockCodec(self.bits, self.block), rng).send()
