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
    begins. It never lands later than that: a period shorter than the delay lands it early. A round of n
    messages advances when i/n of its time in the air is over, for i = 1 … n − 1.
    """

    def __init__(self, when: Schedule, delay: Delay) -> None:
        _check_delay(delay, when)
        self.when, self.delay = when, delay
        self.memory: State = when.init()
        self.planned: int | None = None  # the step after which the next round begins
        self.round = 0  # how many rounds have begun
        self.began = 0  # the step after which the last one began
        self.in_air = False
        self.lands: int | None = None  # the step after which the round in the air lands, once known
        self.advances: list[int] = []  # the steps after which it advances
        self._messages = 1

    def _aim(self) -> None:
        """Work out when the round in the air advances and lands."""
        due = [self.planned] if self.delay == "round" else [self.began + self.delay, self.planned]
        self.lands = min((step for step in due if step is not None and self.in_air), default=None)
        flight, n = (0, 1) if self.lands is None else (self.lands - self.began, self._messages)
        self.advances = [self.began - (-i * flight // n) for i in range(1, n)]

    def plan(self, clock: Clock) -> None:
        """Before a step, if no round is planned: ask the schedule for the next one."""
        self.planned = self.when.next(replace(clock, round=self.round), self.memory)
        past = self.planned is not None and self.planned <= clock.step
        assert not past, f"{self.when!r} plans step {self.planned} after step {clock.step}"
        self._aim()

    def acts(self, step: int) -> list[Act]:
        """What happens after this step, in order."""
        acts: list[Act] = ["land"] if step == self.lands else ["advance"] * self.advances.count(step)
        if step == self.planned:
            acts += ["begin", "land"] if self.delay == 0 else ["begin"]
        return acts

    def next_act(self, step: int) -> int | None:
        """The next step after which something happens, as far as is known now."""
        known = (*self.advances, self.lands, self.planned)
        return min((other for other in known if other is not None and other > step), default=None)

    def begin(self, step: int, messages: int = 2) -> None:
        """A round of so many messages, one after the other, has begun. The planner takes it for two."""
        self.planned, self.began, self.in_air, self._messages = None, step, True, messages
        self.round += 1
        self._aim()

    def land(self) -> None:
        """The round in the air has landed."""
        self.in_air = False
        self._aim()

    def state_dict(self) -> State:
        return {
            "planned": self.planned,
            "round": self.round,
            "began": self.began,
            "in_air": self.in_air,
            "memory": self.memory,
        }

    def load_state_dict(self, state: State) -> None:
        """A round in the air has arrived when it is saved, so it no longer advances."""
        self.planned, self.round, self.began = state["planned"], state["round"], state["began"]
        self.in_air, self.memory, self._messages = state["in_air"], state["memory"], 1
        self._aim()


def _check_delay(delay: Delay, when: Schedule) -> None:
    if delay == "round":
        return
    if not is_whole(delay, 0):
        raise ValueError(f'delay={delay!r}: a number of steps, 0 or more, or "round" is needed.')
    if when.shortest is not None and delay > when.shortest:
        raise ValueError(
            f"delay={delay} with {when!r}: delay must not exceed the period, which can be {when.shortest}."
        )
