"""The contract of every reducer, and of those that lose something on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator
from offbeat.comm.pending import Pending, arrived
from offbeat.reduce.payload_split import PayloadSplit, Vector


class Reducer:
    """What is sent. A frozen value that brings every rank the mean of everyone's payload, or nearly so."""

    @property
    def lossy(self) -> bool:
        """Whether what arrives is only near the mean: then weights are sent as ways from an anchor."""
        return False

    @property
    def agrees(self) -> bool:
        """Whether all ranks get the same, to the bit."""
        return True

    @property
    def remembers(self) -> bool:
        """Whether the mean may hold what was kept from earlier rounds, so that it can be nonzero where no
        worker sends anything now."""
        return False

    def init(self) -> State:
        """What it remembers, at first."""
        return {}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        """Send the payload, which now belongs to the message; the mean may lie in its memory."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Code(Reducer):
    """A reducer that loses something, and can tell what: the seam for error feedback.

    Tensors of fewer than `least` values, and all that rides along with the live ones, go as they are; larger
    `least` loses less. NaN and infinities are refused on all ranks. Alone, nothing is sent, and nothing lost.
    """

    least: int = field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        if not is_whole(self.least, 1):
            raise ValueError(f"{self!r}: least is a number of values, at least 1.")

    def __repr__(self) -> str:
        own = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "least"]
        rest = [] if self.least == 1024 else [f"least={self.least}"]
        return f"{type(self).__name__}({', '.join([*own, *rest])})"

    @property
    def lossy(self) -> bool:
        return True

    @property
    def most(self) -> float:
        """The largest magnitude it can send."""
        return 3.4028234663852886e38

    def takes(self, tensor: Tensor) -> bool:
        """Whether it is made for such a tensor; others go as they are."""
        return tensor.numel() >= self.least

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        return self.send(payload, comm, clock, state)

    def send(
        self,
        payload: Packed,
        comm: Communicator,
        clock: Clock,
        state: State,
        residual: Sequence[Tensor] | None = None,
    ) -> Pending[Packed]:
        """As `start`; `residual`, vectors like those of the payload, holds on arrival what this rank's part
        of the mean lacks: payload − residual, averaged over the ranks, is what arrived."""
        if comm.size == 1:
            for flat in residual or ():
                flat.zero_()
            return arrived(payload)
        split = PayloadSplit(payload, comm, clock, self.takes, self.most, residual)
        return split.landing([self.carry(vector, comm, clock, state) for vector in split.vectors])

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Pending[None]:
        """Replace the values of a vector by their mean, as this code has it, and fill its residual."""
        raise NotImplementedError
