"""The rhythm of an exchange: when its rounds are planned, begin, advance and land, from clocks alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.when import Schedule

Delay = int | Literal["round"]
Act = Literal["land", "advance", "begin"]


class Rhythm:
    """The state machine that the engine drives step by step, and the planner from one act to the next.

    At most one round is in the air. It lands `delay` steps after it began; with "round", when the next one
    begins. It never lands later than that: a period shorter than the delay lands it early.
    """

    def __init__(self, when: Schedule, delay: Delay) -> None:
        _check_delay(delay, when)
        self.when, self.delay = when, delay
        self.memory: State = when.init()
        self.planned: int | None = None  # the step after which the next round begins
        self.round = 0  # how many rounds have begun
        self.began = 0  # the step after which the last one began
        self.in_air = False

    @property
    def lands(self) -> int | None:
        """The step after which the round in the air lands; None while that is not known."""
        if not self.in_air or self.delay == "round":
            return self.planned if self.in_air else None
        due = self.began + self.delay
        return due if self.planned is None else min(due, self.planned)

    @property
    def advances(self) -> int | None:
        """The step in the middle of that flight, the same for every worker."""
        return None if self.lands is None else (self.began + self.lands + 1) // 2

    def plan(self, clock: Clock) -> None:
        """Before a step, if no round is planned: ask the schedule for the next one."""
        self.planned = self.when.next(replace(clock, round=self.round), self.memory)
        past = self.planned is not None and self.planned <= clock.step
        assert not past, f"{self.when!r} plans step {self.planned} after step {clock.step}"

    def acts(self, step: int) -> list[Act]:
        """What happens after this step, in order."""
        acts: list[Act] = []
        if self.in_air:
            if step == self.lands:
                acts.append("land")
            elif step == self.advances:
                acts.append("advance")
        if step == self.planned:
            acts.append("begin")
            if self.delay == 0:
                acts.append("land")
        return acts

    def next_act(self, step: int) -> int | None:
        """The next step after which something happens, as far as is known now."""
        known = (self.advances, self.lands, self.planned)
        return min((other for other in known if other is not None and other > step), default=None)

    def begin(self, step: int) -> None:
        """A round has begun."""
        self.planned, self.began, self.in_air = None, step, True
        self.round += 1

    def land(self) -> None:
        """The round in the air has landed."""
        self.in_air = False

    def state_dict(self) -> State:
        return {
            "planned": self.planned,
            "round": self.round,
            "began": self.began,
            "in_air": self.in_air,
            "memory": self.memory,
        }

    def load_state_dict(self, state: State) -> None:
        self.planned, self.round, self.began = state["planned"], state["round"], state["began"]
        self.in_air, self.memory = state["in_air"], state["memory"]


def _check_delay(delay: Delay, when: Schedule) -> None:
    if delay == "round":
        return
    if not is_whole(delay, 0):
        raise ValueError(f'delay={delay!r}: a number of steps, 0 or more, or "round" is needed.')
    if when.shortest is not None and delay > when.shortest:
        raise ValueError(
            f"delay={delay} with {when!r}: delay must not exceed the period, which can be {when.shortest}."
        )
