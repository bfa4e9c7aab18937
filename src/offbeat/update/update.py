"""How a mean is applied to the live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed, split_alike
from offbeat.comm.communicator import Communicator


class Update:
    """How a mean is applied: a frozen value. What it remembers is in `state`, as plain tensors and numbers.

    `live` are the live tensors. `room` is memory in which they lie packed; it may be overwritten.

    `anchors` says what the update keeps. With "none" it sends weights and can also be used for
    gradients. With "own" each worker keeps an anchor. With "shared" the workers of a round have the same
    anchor and send displacements from it.
    """

    anchors: ClassVar[Literal["none", "own", "shared"]] = "none"

    @property
    def sends(self) -> Literal["weights", "displacements"]:
        """What the update sends. A lossy code may round displacements, but not weights."""
        return "displacements" if self.anchors == "shared" else "weights"

    def init(self) -> State:
        """Return the initial state."""
        return {}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The first period begins: take the anchor."""

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        """Write what this worker sends into `room`."""
        raise NotImplementedError

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        """Write the live tensors in place."""
        raise NotImplementedError

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        """Return this worker's |x − x̄|² and the squared length of the coming change, before `incoming`."""
        raise NotImplementedError

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> list[Tensor] | None:
        """Return what `averaged()` shows in place of the live tensors; None: the live tensors."""
        return None

    def close(self, live: Sequence[Tensor], room: Packed, comm: Communicator, state: State) -> None:
        """The run ends and nothing is in the air: act once more among the workers of a round."""


@dataclass(frozen=True)
class Replace(Update):
    """x ← keep·x + (1 − keep)·mean. A larger `keep` preserves more of the local progress."""

    keep: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise ValueError(f"{self!r}: keep must be at least 0 and below 1.")

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.read(live)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        blend(live, mean, self.keep)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(live, mean.views)
        return drift, (1 - self.keep) ** 2 * drift


@dataclass(frozen=True)
class Correct(Update):
    """x ← x + gain·(mean − sent): replaces the sent value by the mean and keeps the steps made since.

    This is the rule for delayed averaging. A single worker stays as it is. While a message is in the air, the
    rule costs one more copy of the model.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"{self!r}: gain must be above 0 and at most 1.")

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
    """Return |these − those|², summed over the tensors in float64, without a copy of all differences."""
    norms = [
        torch.linalg.vector_norm(x - y, dtype=torch.promote_types(y.dtype, torch.float32)).double()
        for a, b in zip(these, those, strict=True)
        for x, y in split_alike(a, b)
    ]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
