"""Where a worker is, and what a value remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

State = dict[str, Any]
"""What a value remembers between rounds: tensors, numbers and strings, owned and saved by its exchange."""


@dataclass(frozen=True)
class Clock:
    """Where a worker is: iterations completed, rounds begun, and the learning rate.

    Asked for a plan, `lr` is the rate of the coming step; at a round, that of the step just done, and `rates`
    are those of the live tensors, each of its own parameter group. `drift`, `loss` and `round_lr` are of the
    last round known: the spread of the workers' weights, the mean loss since the round before, the rate.
    Inside `Then`, `step` counts from the switch and `origin` is the switch: the run is at origin + step.
    """

    step: int
    round: int
    lr: float
    workers: int = 1  # in this round
    rates: tuple[float, ...] = ()
    drift: float | None = None
    loss: float | None = None
    round_lr: float | None = None
    origin: int = 0
    observed: tuple[float | Tensor, ...] = ()  # losses of the coming step, told by the caller

    @property
    def absolute(self) -> int:
        """Iterations completed since the run began."""
        return self.origin + self.step
