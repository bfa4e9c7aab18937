"""How a landed mean is applied to the live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat.schedule import Clock, State
from offbeat.tensors import Packed


class Update(Protocol):
    """How a mean is applied. A frozen value."""

    @property
    def equalizes(self) -> bool:
        """Whether workers that land the same mean at once are left with the same tensors."""

    def init(self) -> State:
        """What it remembers, at first."""

    def outgoing(self, live: Sequence[Tensor], payload: Packed, state: State) -> None:
        """Write what this worker sends into `payload`."""

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        """Write the live tensors in place."""

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float]:
        """Asked before `incoming`: this worker's |x − x̄|², and the square length of the change to come."""


@dataclass(frozen=True)
class Replace:
    """x ← keep·x + (1 − keep)·mean. Larger `keep` holds on to more of the local progress."""

    keep: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise ValueError(f"{self!r}: keep must be at least 0 and below 1.")

    @property
    def equalizes(self) -> bool:
        return self.keep == 0

    def init(self) -> State:
        return {}

    def outgoing(self, live: Sequence[Tensor], payload: Packed, state: State) -> None:
        payload.read(live)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        if self.keep == 0:
            mean.write(live)
        else:
            for x, m in zip(live, mean.views, strict=True):
                x.copy_(self.keep * x.to(m.dtype) + (1 - self.keep) * m)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float]:
        drift = square_distance(live, mean.views)
        return drift, (1 - self.keep) ** 2 * drift


@dataclass(frozen=True)
class Correct:
    """x ← x + gain·(mean − sent): what was sent is moved to the mean, what was done since is kept.

    The rule for delayed averaging; one worker is left as it is. Costs one more copy of the model in the air.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"{self!r}: gain must be above 0 and at most 1.")

    @property
    def equalizes(self) -> bool:
        return False

    def init(self) -> State:
        return {}

    def outgoing(self, live: Sequence[Tensor], payload: Packed, state: State) -> None:
        payload.read(live)
        state["sent"] = [flat.clone() for flat in payload.flats]

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for flat, sent in zip(mean.flats, state.pop("sent"), strict=True):
            flat.sub_(sent).mul_(self.gain)
        for x, change in zip(live, mean.views, strict=True):
            x.add_(change)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float]:
        drift = square_distance(state["sent"], mean.flats)
        return drift, self.gain**2 * drift


def square_distance(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """|these − those|², summed over the tensors in float64."""
    if not these:
        return 0.0
    lengths = [
        torch.linalg.vector_norm(a - b, dtype=torch.promote_types(b.dtype, torch.float32))
        for a, b in zip(these, those, strict=True)
    ]
    return float(torch.stack([length.double() for length in lengths]).square().sum())
