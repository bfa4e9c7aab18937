"""When everything happens: the real schedules, asked as a run would ask them."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offbeat.base.clock import Clock
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.round import Rhythm
from offbeat.plan.job import Job

What = Literal["ask", "land", "advance", "begin"]


class Act(NamedTuple):
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
    rounds: Counter[int]  # of each exchange
    iterations: list[int]  # completed after each gradient, those without one included


def unroll(parts: list[Part], job: Job) -> Timeline:
    """All rounds of all exchanges of a run."""
    iterations = _count_iterations(parts, job)
    acts: list[Act] = []
    flush: list[Act] = []
    for place, part in enumerate(parts):
        for order, (at, what, round) in enumerate(_find_acts(part, job, iterations)):
            done = bisect.bisect_left(iterations, at) + 1
            late = what != "ask" and not (isinstance(part, Exchange) and part.live.early)
            act = Act(done, at, late, place, order, what, round)
            (acts if at <= iterations[-1] else flush).append(act)
    return Timeline(sorted(acts), flush, Counter(a.place for a in acts if a.what == "begin"), iterations)


def _count_iterations(parts: list[Part], job: Job) -> list[int]:
    """After each gradient; a part may follow it with iterations that need none."""
    extra = [part for part in parts if type(part).again is not Part.again]
    if not extra:
        return list(range(1, job.steps + 1))
    completed, after = 0, []
    for done in range(1, job.steps + 1):
        completed += 1
        while True in [part.again(Clock(completed, 0, job.rate(done - 1))) for part in extra]:
            completed += 1
        after.append(completed)
    return after


def _find_acts(part: Part, job: Job, iterations: list[int]) -> Iterator[tuple[int, What, int]]:
    """The iteration, kind and round of every act of an exchange. What finish() lands comes after the last."""
    if not isinstance(part, Exchange):
        return
    rhythm, end, step, advanced = Rhythm(part.when, part.delay), iterations[-1], 0, False
    while step <= end:
        if rhythm.planned is None and step < end:
            if part.when.needs and rhythm.round and step == rhythm.began:
                yield step + 1, "ask", rhythm.round - 1
            rhythm.plan(Clock(step=step, round=0, lr=job.rate(bisect.bisect_right(iterations, step))))
        step = step + 1 if rhythm.planned is None else rhythm.next_act(step) or end + 1
        flush: list[What] = ["land"] if rhythm.in_air else []
        for what in rhythm.acts(step) if step <= end else flush:
            if what == "begin":
                rhythm.begin(step)
                advanced = False
            elif what == "advance":
                advanced = True
            elif part.delay and not advanced:
                yield min(step, end + 1), "advance", rhythm.round - 1  # at the latest
            yield min(step, end + 1), what, rhythm.round - 1
            if what == "land":
                rhythm.land()
