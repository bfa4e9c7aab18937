"""Workers that fail and come back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.base.draws import uniform
from offbeat.base.errors import BadArgument


@dataclass(frozen=True)
class Failures:
    """Each worker fails `per_hour` times per hour of work, at random, and is back after `restart` seconds.

    What it had done since the last checkpoint, one every `checkpoint` seconds of work, is done again. A run
    that resumes is equal to the bit to one that was never interrupted: a failure costs time, nothing else.
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
        """Seconds of one failure, on average."""
        return self.restart + self.checkpoint / 2

    def gap(self, rank: int, number: int) -> float:
        """Seconds of work between two failures of a worker."""
        if not self.per_hour:
            return math.inf
        return -math.log1p(-uniform(self.seed, rank, number, "failure")) * 3600 / self.per_hour


class Uptime:
    """One worker's work between failures."""

    def __init__(self, failures: Failures, rank: int) -> None:
        self._failures, self._rank = failures, rank
        self._worked, self._number, self._next = 0.0, 0, failures.gap(rank, 0)

    def lost(self, seconds: float) -> float:
        """How long the failures last that fall into the coming seconds of work."""
        self._worked += seconds
        lost = 0.0
        while self._next <= self._worked:
            again = self._next % self._failures.checkpoint if self._failures.checkpoint else 0.0
            lost += self._failures.restart + again
            self._number += 1
            self._next += self._failures.gap(self._rank, self._number)
        return lost
