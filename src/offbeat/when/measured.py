"""Schedules that follow the time that steps and messages take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median

from offbeat.base.checks import is_number
from offbeat.base.clock import Clock, State
from offbeat.when.schedule import LATER, Schedule, check_fields

_ROUNDS = 4  # rounds whose times are averaged
_GROWTH = 4  # the largest ratio of a period to the one before


@dataclass(frozen=True)
class Seconds(Schedule):
    """A round after this time. Until then each worker makes as many steps as it can.

    On each worker the round begins after the first step that ends later than this, so that a fast worker does
    not wait for a slow one. Workers are weighted by their steps, or by `samples` if these are given. Every
    worker measures with its own clock, from the end of the last round.
    """

    seconds: float
    timed = True

    def __post_init__(self) -> None:
        if not is_number(self.seconds) or not 0 < self.seconds < math.inf:
            raise ValueError(f"{self!r}: seconds must be a positive number.")

    def next(self, clock: Clock, state: State) -> int | None:
        return clock.step + 1 if clock.dry or clock.elapsed >= self.seconds else LATER


@dataclass(frozen=True)
class Budget(Schedule):
    """The shortest period whose exposed communication takes at most this `share` of the time.

        H = ⌈T (1 − share) / (share · t)⌉        without a delay

    T is the time of a round on the worker that begins it last, the mean of the last four rounds. t is the
    time of a local step on the slowest worker, their median. If the small message in which all workers agree
    on both takes longer than a step, the rest of it counts as well. A delay hides part of T. The period is at
    least `least`, with which the run begins, at most `most`, and at most four times as long as the one
    before.
    """

    share: float
    least: int = 1
    most: int = 500
    needs = frozenset({"cost"})

    def __post_init__(self) -> None:
        check_fields(self, least=1)
        check_fields(self, most=self.least)
        if not is_number(self.share) or not 0 < self.share < 1:
            raise ValueError(f"{self!r}: share must be above 0 and below 1.")

    @property
    def shortest(self) -> int:
        return self.least

    def init(self) -> State:
        return {"period": self.least, "seen": 0, "flights": [], "paces": [], "asked": []}

    def next(self, clock: Clock, state: State) -> int | None:
        if clock.cost is not None and clock.round > state["seen"]:
            state["seen"] = clock.round
            for name, seconds in zip(("flights", "paces", "asked"), clock.cost, strict=True):
                state[name] = [*state[name], seconds][-_ROUNDS:]
            flight, pace, asked = mean(state["flights"]), median(state["paces"]), mean(state["asked"])
            wanted = self.period(flight, pace, clock.delay, asked)
            state["period"] = min(max(wanted, self.least), self.most, _GROWTH * state["period"])
        return clock.step + int(state["period"])

    def period(self, flight: float, pace: float, delay: float = 0, asked: float = 0) -> int:
        """Return the period for a round of `flight` seconds, of which `delay` steps of `pace` hide a part.

        Workers agree on these numbers in `asked` seconds. The schedule needs them after the first gradient of
        a period, which hides a part of that, or all of it if a delay lets the round land steps before.
        """
        asked = max(0.0, asked - pace) if delay in (0, math.inf) else 0.0
        if flight + asked <= 0 or pace <= 0:
            return self.least if flight + asked <= 0 else self.most
        rest = (1 - self.share) / pace
        steps = max((flight + asked) * rest, asked * rest / self.share)  # if all of them hide the flight
        if steps > delay:
            steps = max(delay, (max(0.0, flight - delay * pace) + asked) * rest / self.share)
        return math.ceil(min(steps, self.most))
