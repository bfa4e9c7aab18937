"""Predicts how many steps a schedule that measures time would choose, from the link and the step time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from offbeat.methods.expression import Call
from offbeat.plan.job import Cluster
from offbeat.when import Budget, Schedule, Seconds

_STEPS = 64  # steps of each worker that are sampled
_APART = 1.05  # workers differ if the mean step of one is longer by this factor than that of another


def fix_period(call: Call, cluster: Cluster, exposed: Callable[[Call], float]) -> tuple[Call, str] | None:
    """Return the call with a fixed number of steps, and a note; None if its schedule counts steps.

    `exposed` predicts the exposed share of the time that a call takes.
    """
    every = call.arguments.get("every")
    if isinstance(every, Seconds):
        steps = _count_steps(every, cluster)
    elif isinstance(every, Budget):
        steps = _find_shortest(every, lambda steps: exposed(call.but(every=steps)) <= every.share)
    elif isinstance(every, Schedule) and (every.timed or "cost" in every.needs):
        raise ValueError(f"every={every!r}: the planner supports Seconds and Budget only outside of Then.")
    else:
        return None
    return call.but(every=steps), f"its period follows the time; planned as every={steps}"


def _count_steps(every: Seconds, cluster: Cluster) -> int:
    ranks, steps = torch.arange(cluster.workers)[:, None], torch.arange(_STEPS)[None, :]
    means = cluster.compute.seconds(ranks, steps).mean(1)
    if float(means.max()) > _APART * float(means.min()):
        raise ValueError(
            f"every={every!r}: the planner lets all workers make the same steps, but these differ in speed: "
            "simulate it."
        )
    return max(1, math.ceil(every.seconds / float(means.mean())))


def _find_shortest(every: Budget, fits: Callable[[int], bool]) -> int:
    """The shortest period that fits the budget, or the longest that is allowed."""
    low, high = every.least, every.most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
