"""How a landed mean is applied to the live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator


class Update:
    """How a mean is applied. A frozen value; what it remembers is in `state`, in plain tensors and numbers.

    `live` are the live tensors; `room` is memory in which they lie packed, free to be overwritten.
    """

    @property
    def sends_weights(self) -> bool:
        """Whether it sends weights themselves, which a lossy code would round, not the way from an anchor."""
        return False

    @property
    def shares_anchor(self) -> bool:
        """Whether it needs the members of a round to have the same anchor, so that groups must not change."""
        return False

    @property
    def anchored(self) -> bool:
        """Whether it keeps an anchor, the weights of an earlier step. If so, it is not for gradients."""
        return False

    def init(self) -> State:
        """What it remembers, at first."""
        return {}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The first period begins: take anchors."""

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        """Write what this worker sends into `room`."""
        raise NotImplementedError

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        """Write the live tensors in place."""
        raise NotImplementedError

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        """Asked before `incoming`: this worker's |x − x̄|², and the square length of the change to come."""
        raise NotImplementedError

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> list[Tensor] | None:
        """Return what `averaged()` shows in place of the live tensors; None: the live tensors."""
        return None

    def close(self, live: Sequence[Tensor], room: Packed, comm: Communicator, state: State) -> None:
        """The run ends and nothing is in the air: act once more among the workers of a round."""

    def follow(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """All workers have been given the same weights: anchors follow."""


@dataclass(frozen=True)
class Replace(Update):
    """x ← keep·x + (1 − keep)·mean. Larger `keep` holds on to more of the local progress."""

    keep: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise ValueError(f"{self!r}: keep must be at least 0 and below 1.")

    @property
    def sends_weights(self) -> bool:
        return True

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.stage(live)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        blend(live, mean, self.keep)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(live, mean.views)
        return drift, (1 - self.keep) ** 2 * drift


@dataclass(frozen=True)
class Correct(Update):
    """x ← x + gain·(mean − sent): what was sent is moved to the mean, what was done since is kept.

    The rule for delayed averaging; one worker is left as it is. Costs one more copy of the model in the air.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"{self!r}: gain must be above 0 and at most 1.")

    @property
    def sends_weights(self) -> bool:
        return True

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.read(live)
        state["sent"] = [flat.clone() for flat in room.flats]

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for flat, sent in zip(mean.flats, state.pop("sent"), strict=True):
            flat.sub_(sent).mul_(self.gain)
        for x, change in zip(live, mean.views, strict=True):
            x.add_(change)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(state["sent"], mean.flats)
        return drift, self.gain**2 * drift


def blend(live: Sequence[Tensor], values: Packed, keep: float) -> None:
    """x ← keep·x + (1 − keep)·value, in the wider of both dtypes."""
    if keep == 0:
        values.write(live)
        return
    for x, value in zip(live, values.views, strict=True):
        x.copy_(keep * x.to(value.dtype) + (1 - keep) * value.to(x.device))


def square_distance(these: Iterable[Tensor], those: Iterable[Tensor]) -> float:
    """|these − those|², summed over the tensors in float64; at no time is there a difference of them all."""
    squares = [
        torch.linalg.vector_norm(x - y, dtype=torch.promote_types(y.dtype, torch.float32)).double().square()
        for a, b in zip(these, those, strict=True)
        for x, y in zip(_pieces(a), _pieces(b), strict=True)
    ]
    return float(torch.stack(squares).sum()) if squares else 0.0


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """A long vector in pieces."""
    return torch.split(tensor, 2**21) if tensor.dim() == 1 else (tensor,)
