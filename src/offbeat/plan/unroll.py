"""When everything happens: the real schedules, asked as a run would ask them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal

from offbeat.base.clock import Clock
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.round import Rhythm
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
    """The acts of one exchange, as its rhythm has them; returns how many rounds there were."""
    rhythm, end, step = Rhythm(part.when, part.delay), iterations[-1], 0
    advanced = False

    def act(at: int, what: What, number: int, to: list[Act] = acts) -> None:
        done = bisect.bisect_left(iterations, at) + 1
        to.append(Act(done, at, what != "ask" and not part.live.early, place, len(to), what, number))

    def land(at: int, to: list[Act]) -> None:
        if part.delay and not advanced:
            act(at, "advance", rhythm.round - 1, to)  # at the latest
        act(at, "land", rhythm.round - 1, to)
        rhythm.land()

    while step < end:
        if rhythm.planned is None:
            if part.when.needs and rhythm.round and step == rhythm.began:
                act(step + 1, "ask", rhythm.round - 1)
            rhythm.plan(Clock(step=step, round=0, lr=job.rate(bisect.bisect_right(iterations, step))))
        step = min(end + 1, step + 1 if rhythm.planned is None else rhythm.next_act(step) or end + 1)
        for what in rhythm.acts(step) if step <= end else ():
            if what == "land":
                land(step, acts)
            elif what == "advance":
                advanced = True
                act(step, what, rhythm.round - 1)
            else:
                advanced = False
                act(step, what, rhythm.round)
                rhythm.begin(step)
    if rhythm.in_air:
        land(end, flush)
    return rhythm.round
