"""One piece of every tensor, a different one each round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Span, Vector
from offbeat.reduce.topk import check_ratio


@dataclass(frozen=True, repr=False)
class RandomBlock(Code):
    """One contiguous piece of each tensor, 1/`ratio` of it. It starts anywhere and may wrap around.

    The start depends on `seed`, round and name and is the same on all ranks, so no positions are sent and the
    pieces are averaged exactly. Values not sent count as zero. Use it with `ErrorFeedback` or `Detached`.
    Larger `ratio` sends less.

        offbeat.local_sgd(model, optimizer, reduce=ErrorFeedback(RandomBlock(64)))
    """

    ratio: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self, self.ratio)

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Pending[None]:
        ends = [end for span in vector.spans for end in self._pieces(span, clock.round)]
        piece = torch.cat([vector.values[low:high] for low, high in ends])
        if vector.residual is not None:
            vector.residual.copy_(vector.values)
            torch._foreach_zero_([vector.residual[low:high] for low, high in ends])
        vector.values.zero_()

        def arrive(means: list[Tensor]) -> None:
            parts = torch.split(means[0], [high - low for low, high in ends])
            torch._foreach_copy_([vector.values[low:high] for low, high in ends], list(parts))

        return comm.mean([piece]).then(arrive)

    def _pieces(self, span: Span, round: int) -> list[tuple[int, int]]:
        """One piece of the tensor, or two where it wraps around."""
        length = max(1, span.size // self.ratio)
        first = whole(self.seed, round, span.name) % span.size
        over = max(0, first + length - span.size)
        tail = [(span.start, span.start + over)] if over else []
        return [(span.start + first, span.start + first + length - over), *tail]
