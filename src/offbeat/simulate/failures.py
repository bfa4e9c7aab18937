"""Failures of workers, and the time they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.base.draws import uniform
from offbeat.base.errors import BadArgument


@dataclass(frozen=True)
class Failures:
    """Each worker fails `per_hour` times per hour of work, at random, and is back after `restart` seconds.

    It repeats the work since its last checkpoint; there is one every `checkpoint` seconds of work. A resumed
    run equals an uninterrupted one to the bit, so a failure costs time and nothing else.
    """

    per_hour: float
    restart: float = 60.0
    checkpoint: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("per_hour", "restart", "checkpoint"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BadArgument(name, value, f"{name} must be a finite number, 0 or more.", call=self)
        if self.per_hour > 3600:
            raise BadArgument(
                "per_hour", self.per_hour, "per_hour must be at most 3600, one failure per second.", call=self
            )

    @property
    def cost(self) -> float:
        """The average cost of one failure, in seconds."""
        return self.restart + self.checkpoint / 2

    def gap(self, rank: int, number: int) -> float:
        """Seconds of work before failure `number` of a worker, since the one before."""
        if not self.per_hour:
            return math.inf
        return -math.log1p(-uniform(self.seed, rank, number, "failure")) * 3600 / self.per_hour


class Uptime:
    """The failures of one worker over time."""

    def __init__(self, failures: Failures, rank: int) -> None:
        self._failures, self._rank = failures, rank
        self._worked, self._number, self._next = 0.0, 0, failures.gap(rank, 0)

    def lost(self, seconds: float) -> float:
        """Seconds lost to failures during the next `seconds` of work."""
        self._worked += seconds
        lost = 0.0
        while self._next <= self._worked:
            again = self._next % self._failures.checkpoint if self._failures.checkpoint else 0.0
            lost += self._failures.restart + again
            self._number += 1
            self._next += self._failures.gap(self._rank, self._number)
        return lost
