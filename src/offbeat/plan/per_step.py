"""What a method costs once it is under way, without start, warm-up and end."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from offbeat.methods.expression import method
from offbeat.plan.amount import Amount
from offbeat.plan.groups import Groups, alike, groups_at
from offbeat.plan.job import Job
from offbeat.plan.probe import Acts, Seen, probe
from offbeat.plan.unroll import Act, unroll

LEAD = 128  # steps before the window that counts, in which the first rounds are
WARM = ("warmup", "switch")  # arguments that say how long a method does something else first


@dataclass(frozen=True)
class Steady:
    """Bytes that a worker sends per step, on average, and the most copies of the model that it keeps."""

    bytes_per_step: float
    copies: float


def steady(call: str, job: Job, workers: int) -> Steady:
    """Of the method in this call after its warm-up, over `job.steps` steps; best a multiple of its period."""
    seen = probe(method(warmed(call)), job, workers)
    before, after = (_sent(seen, replace(job, steps=steps), workers) for steps in (LEAD, LEAD + job.steps))
    return Steady((after - before) / job.steps, seen.copies)


def warmed(call: str) -> str:
    """The call with a warm-up of one step: what comes after it is the same, and seen at once."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    for keyword in tree.keywords:
        if keyword.arg in WARM:
            keyword.value = ast.Constant(1)
    return ast.unparse(tree)


def _sent(seen: Seen, job: Job, workers: int) -> int:
    known: dict[tuple[int, int], Groups] = {}

    def among(act: Act) -> Groups:
        key = (act.place, alike(act.round))
        if key not in known:
            known[key] = groups_at(seen.sync.parts[act.place], key[1], workers)
        return known[key]

    return Amount(seen, unroll(seen.sync.parts, job), Acts((), {}), workers, among).bytes_sent()
