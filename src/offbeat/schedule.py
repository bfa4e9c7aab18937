"""When the next round comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

State = dict[str, Any]
"""What a value remembers between rounds: tensors, numbers and strings, owned and saved by its exchange."""


@dataclass(frozen=True)
class Clock:
    """Where a worker is: iterations completed, rounds begun, and the learning rate.

    Asked for a plan, it is the rate of the coming step; at a round, that of the step just done. `drift` is
    the spread of the workers' weights at the last round, None before it is known.
    """

    step: int
    round: int
    lr: float
    drift: float | None = None


class Schedule:
    """When the next round comes. A frozen value; equal on all ranks for equal clocks."""

    @property
    def shortest(self) -> int | None:
        """The least number of steps between two rounds; None if it cannot be known beforehand."""
        return None

    def init(self) -> State:
        """What it remembers, at first."""
        return {}

    def next(self, clock: Clock, state: State) -> int | None:
        """The number of completed iterations, above `clock.step`, after which the next round begins.

        Asked once per period, before its first step. None: nothing is planned, ask again before the next.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Every(Schedule):
    """A round after each step n ≡ offset (mod steps), except where n is a multiple of `skip`."""

    steps: int
    offset: int = 0
    skip: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"{self!r}: steps must be at least 1.")
        if not 0 <= self.offset < self.steps:
            raise ValueError(f"{self!r}: offset must be between 0 and steps - 1.")
        if self.skip is not None and (self.skip < 1 or self.skip % self.steps):
            raise ValueError(f"{self!r}: skip must be a multiple of steps.")

    def __repr__(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        skip = f", skip={self.skip}" if self.skip is not None else ""
        return f"Every(steps={self.steps}{offset}{skip})"

    @property
    def shortest(self) -> int:
        return self.steps

    def next(self, clock: Clock, state: State) -> int | None:
        if self.skip == self.steps and self.offset == 0:
            return None
        due = clock.step + 1 + (self.offset - clock.step - 1) % self.steps
        return due if self.skip is None or due % self.skip else due + self.steps


@dataclass(frozen=True)
class Never(Schedule):
    """No rounds at all."""

    def next(self, clock: Clock, state: State) -> int | None:
        return None


@dataclass(frozen=True)
class Then(Schedule):
    """`first` rules the steps 1 … switch, `second` those after, counting from the switch.

    A period belongs wholly to the schedule in force at its first step.
    """

    switch: int
    first: Schedule
    second: Schedule

    def __post_init__(self) -> None:
        if self.switch < 0:
            raise ValueError(f"{self!r}: switch must not be negative.")

    def init(self) -> State:
        return {"first": self.first.init(), "second": self.second.init()}

    def next(self, clock: Clock, state: State) -> int | None:
        if clock.step < self.switch:
            return self.first.next(clock, state["first"])
        due = self.second.next(replace(clock, step=clock.step - self.switch), state["second"])
        return None if due is None else due + self.switch


@dataclass(frozen=True)
class QSR(Schedule):
    """The quadratic synchronization rule: the period grows as the learning rate decays.

        H = max(base, ⌊(alpha / lr)^power⌋)

    with the lr of the period's first step. Larger `alpha` communicates less. During the first `warmup` steps
    the rule is applied to `peak`, the rate the warm-up leads to, or H = base if it is not given: on the tiny
    rates of a warm-up it would be astronomic. With `total`, the last round ends the run. First alpha to try:
    peak·√base with AdamW, about 0.17 of that with SGD.

    Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024, arXiv 2310.14423.
    """

    alpha: float
    base: int = 4
    warmup: int = 0
    peak: float | None = None
    total: int | None = None
    power: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"{self!r}: alpha must be a finite number, 0 or more.")
        if self.base < 1:
            raise ValueError(f"{self!r}: base must be at least 1.")
        if self.warmup < 0:
            raise ValueError(f"{self!r}: warmup must not be negative.")
        if self.peak is not None and not self.peak > 0:
            raise ValueError(f"{self!r}: peak must be positive.")
        if self.total is not None and self.total < 1:
            raise ValueError(f"{self!r}: total must be at least 1.")
        if not self.power > 0:
            raise ValueError(f"{self!r}: power must be positive.")

    @property
    def shortest(self) -> int | None:
        return self.base if self.total is None else None

    def next(self, clock: Clock, state: State) -> int | None:
        period = self._period(self.peak if clock.step < self.warmup else clock.lr)
        if self.total is not None and clock.step < self.total:
            period = max(1, min(period, self.total - clock.step))
        return clock.step + period

    def _period(self, lr: float | None) -> int:
        if lr is None or lr <= 0:
            return self.base
        # A longer period than 2³¹ steps means no more rounds; the cap keeps the power finite.
        ratio = min(self.alpha / lr, 2.0 ** min(31 / self.power, 1023))
        return max(self.base, int(ratio**self.power))


def schedule(every: int | Schedule) -> Schedule:
    """`every=8` means `Every(8)`."""
    if isinstance(every, Schedule):
        return every
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every={every!r}: a whole number of steps or a schedule such as Every(8) is needed.")
    return Every(every)
