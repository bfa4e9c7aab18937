"""When everything happens: the real schedules, asked as a run would ask them."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from offbeat.base.clock import Clock
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.round import halfway, soonest
from offbeat.plan.job import Job

What = Literal["ask", "land", "advance", "begin"]


@dataclass(frozen=True, order=True)
class Act:
    """One exchange does something after `done` gradients; `iteration` counts steps without one, too."""

    done: int
    iteration: int
    late: bool  # after the local step, not before it
    place: int  # of the exchange among the parts
    order: int  # at the same moment
    what: What
    round: int


@dataclass(frozen=True)
class Timeline:
    """The whole run."""

    acts: list[Act]
    flush: list[Act]  # what finish() still has to land
    rounds: dict[int, int]  # of each exchange
    iterations: list[int]  # completed after each gradient, those without one included


def unroll(parts: list[Part], job: Job) -> Timeline:
    """All rounds of all exchanges of a run."""
    iterations = _iterations(parts, job)
    acts: list[Act] = []
    flush: list[Act] = []
    rounds = {}
    for place, part in enumerate(parts):
        if isinstance(part, Exchange):
            rounds[place] = _rounds(part, place, job, iterations, acts, flush)
    acts.sort()
    return Timeline(acts, flush, rounds, iterations)


def _iterations(parts: list[Part], job: Job) -> list[int]:
    """After each gradient; a part may follow it with iterations that need none."""
    extra = [part for part in parts if type(part).again is not Part.again]
    if not extra:
        return list(range(1, job.steps + 1))
    completed, after = 0, []
    for done in range(1, job.steps + 1):
        completed += 1
        while _again(extra, Clock(completed, 0, job.rate(done - 1))):
            completed += 1
        after.append(completed)
    return after


def _again(parts: list[Part], clock: Clock) -> bool:
    answers = [part.again(clock) for part in parts]
    return any(answers)


def _rounds(
    part: Exchange, place: int, job: Job, iterations: list[int], acts: list[Act], flush: list[Act]
) -> int:
    """The acts of one exchange, in the order of `Exchange.tick`; returns how many rounds there were."""
    end, state = iterations[-1], part.when.init()
    step, number = 0, 0
    flying: int | None = None  # the round in the air
    due: int | None = None
    advanced = False

    def act(at: int, what: What, number: int, to: list[Act] = acts) -> None:
        done = bisect.bisect_left(iterations, at) + 1
        to.append(Act(done, at, what != "ask" and not part.live.early, place, len(to), what, number))

    def land(at: int, number: int, advanced: bool, to: list[Act]) -> None:
        if not advanced:
            act(at, "advance", number, to)  # at the latest
        act(at, "land", number, to)

    while step < end:
        plan = _planned(part, step, number, end, job.rate, iterations, state)
        if part.when.needs and number:
            act(step + 1, "ask", number - 1)
        begins = plan if plan is not None and plan <= end else None
        if flying is not None:
            at = soonest(due, plan)
            half = halfway(step, at)
            advanced = half is not None and at is not None and half <= end and half < at
            if half is not None and advanced:
                act(half, "advance", flying)
            if at is not None and at <= end:
                land(at, flying, advanced, acts)
                flying = None
        if begins is None:
            break
        act(begins, "begin", number)
        if part.delay == 0:
            act(begins, "land", number)
        else:
            advanced = False
            flying, due = number, None if part.delay == "round" else begins + part.delay
        step, number = begins, number + 1
    if flying is not None:
        land(end, flying, advanced, flush)
    return number


def _planned(
    part: Exchange,
    step: int,
    number: int,
    end: int,
    rate: Callable[[int], float],
    iterations: list[int],
    state: dict[str, object],
) -> int | None:
    """The next round, asked before every step until there is one."""
    for now in range(step, end):
        done = bisect.bisect_right(iterations, now)
        plan = part.when.next(Clock(step=now, round=number, lr=rate(done)), state)
        if plan is not None:
            return plan
    return None
