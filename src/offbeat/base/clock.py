"""The position of a worker in its run, and the state of a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

State = dict[str, Any]
"""What a value remembers between rounds: tensors, numbers and strings. Its exchange owns and saves it."""


class Cost(NamedTuple):
    """Seconds that all workers agree on."""

    flight: float  # of a round, on the worker that began it last
    pace: float  # of a step, on the slowest worker
    asked: float = 0.0  # of the message with which workers agree on these numbers


@dataclass(frozen=True)
class Clock:
    """The position of a worker: iterations completed, rounds begun, and the learning rate.

    When a schedule plans, `lr` is the rate of the coming step. At a round it is that of the last step, and
    `rates` has that of each live tensor if the update is `rated`. `drift`, `loss` and `round_lr` describe the
    last round whose report has arrived: the spread of the weights, the mean loss since the round before, and
    the rate. `cost` is what that round and the steps before it took, `delay` the steps that hide a part of
    it, and `elapsed` the seconds since the last round. Inside `Then`, `step` counts from the switch,
    `origin`.
    """

    step: int
    round: int
    lr: float
    workers: int = 1  # in this round
    rates: tuple[float, ...] = ()
    drift: float | None = None
    loss: float | None = None
    round_lr: float | None = None
    cost: Cost | None = None
    delay: float = 0.0
    elapsed: float = 0.0
    origin: int = 0
    observed: tuple[float | Tensor, ...] = ()  # losses of the coming step, given by the caller
    samples: float | None = None  # of the coming step, given by the caller
    dry: bool = False  # whether this worker has no more data, so that it makes no steps of its own

    @property
    def absolute(self) -> int:
        """Iterations completed since the start of the run."""
        return self.origin + self.step
