"""The cost of a method per step, without start, warm-up and end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offbeat.methods.expression import Call
from offbeat.plan.amount import Amount
from offbeat.plan.groups import Groups, alike, groups_at
from offbeat.plan.job import Job
from offbeat.plan.probe import Seen, Trace, probe
from offbeat.plan.unroll import Act, unroll

LEAD = 128  # steps that do not count, with the first rounds
WARM = ("warmup", "switch")  # arguments for how long a method does something else first


@dataclass(frozen=True)
class PerStepCost:
    """Mean bytes that a worker sends per step, and the most copies of the model that it keeps."""

    bytes_per_step: float
    copies: float


def per_step_cost(call: Call, job: Job, workers: int) -> PerStepCost:
    """The cost of this call after its warm-up, over `job.steps` steps: best a multiple of its period."""
    seen = probe(without_warmup(call), job, workers)
    before, after = (_sent(seen, replace(job, steps=steps), workers) for steps in (LEAD, LEAD + job.steps))
    return PerStepCost((after - before) / job.steps, seen.copies)


def without_warmup(call: Call) -> Call:
    """The call with a warm-up of one step. What follows is the same, and is observed sooner."""
    return call.but(**{name: 1 for name in WARM if name in call.arguments})


def _sent(seen: Seen, job: Job, workers: int) -> int:
    known: dict[tuple[int, int], Groups] = {}

    def among(act: Act) -> Groups:
        key = (act.place, alike(act.round))
        if key not in known:
            known[key] = groups_at(seen.sync.parts[act.place], key[1], workers)
        return known[key]

    return Amount(seen, unroll(seen.sync.parts, job), Trace((), {}), workers, among).bytes_sent()
