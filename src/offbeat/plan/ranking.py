"""Compare methods: which is fastest, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offbeat.plan.job import Cluster, Job
from offbeat.plan.prediction import Prediction, predict

_DDP = "ddp()"
_SLACK = 1.05  # counts as equally fast for the break-even bandwidth
_LITTLE = 0.1  # a share of the run too small to be worth saving


@dataclass(frozen=True)
class Plan:
    """Predictions, fastest first, and one sentence on why the first wins."""

    job: Job
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    why: str


def plan(methods: Sequence[str], job: Job, cluster: Cluster) -> Plan:
    """Predict the time of each method, and rank them.

    job = Job(steps=10_000, parameters=124_000_000)
    cluster = Cluster(8, Jittered(0.5), Network(latency=0.01, bandwidth=1.25e8))
    plan(["ddp()", "local_sgd(every=8)", "diloco(every=64)"], job, cluster).why
    """
    if not methods:
        raise ValueError("plan(methods=[]): at least one method is needed.")
    predicted = {expression: predict(expression, job, cluster) for expression in dict.fromkeys(methods)}
    ddp = next((p for p in predicted.values() if p.method == _DDP), None) or predict(_DDP, job, cluster)
    ranked = sorted((_compare(p, ddp) for p in predicted.values()), key=lambda p: p.seconds)
    return Plan(job, cluster, tuple(ranked), _why(ranked, _compare(ddp, ddp)))


def _compare(prediction: Prediction, ddp: Prediction) -> Prediction:
    if prediction.method == ddp.method or not prediction.curve:
        return prediction
    gain = [(b, theirs / ours) for (b, ours), (_, theirs) in zip(prediction.curve, ddp.curve, strict=True)]
    return replace(
        prediction,
        break_even=crossing(gain, _SLACK),
        ddp_needs=crossing(list(ddp.curve), prediction.seconds),
    )


def crossing(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The bandwidth at which a falling curve reaches a level; time goes with the inverse of bandwidth.

    None if it is above the level to the end, or below it from the beginning.
    """
    for (left, above), (right, below) in pairwise(curve):
        if above > level >= below:
            share = (above - level) / (above - below)
            return 1 / (1 / left + share * (1 / right - 1 / left))
    return None


def _why(ranked: Sequence[Prediction], ddp: Prediction) -> str:
    best = ranked[0]
    ratio = ddp.seconds / best.seconds
    if ratio < 0.98:
        return f"None of these: ddp() would be {1 / ratio:.2f} times as fast as {best.method}."
    if best.method == ddp.method or ratio < 1.02:
        return _why_equal(best, ddp)
    return f"{best.method} is {ratio:.2f} times as fast as ddp(): {_reason(best, ddp)}."


def _why_equal(best: Prediction, ddp: Prediction) -> str:
    """Say whether nothing can be saved, or none of these methods saves it."""
    idle = (ddp.exposed + ddp.waiting) / ddp.seconds
    if idle < _LITTLE:
        return (
            f"{best.method} is as good as any: ddp() waits for messages in only "
            f"{ddp.exposed / ddp.seconds:.0%} of the run, so communicating less often saves little."
        )
    return (
        f"{best.method} is as good as any of these, but ddp() waits for messages or slower workers in "
        f"{idle:.0%} of the run: a method that communicates less often may save some of it."
    )


def _reason(best: Prediction, ddp: Prediction) -> str:
    """Say where most of the difference comes from."""
    messages, slower = ddp.exposed - best.exposed, ddp.waiting - best.waiting
    if slower > messages:
        return (
            f"its workers wait {best.waiting / best.seconds:.0%} of the run for slower ones instead of "
            f"{ddp.waiting / ddp.seconds:.0%}"
        )
    sent = best.bytes_sent / max(1, ddp.bytes_sent)
    hidden = best.hidden / max(1e-12, best.hidden + best.exposed)
    how = f"it sends {sent:.1%} of the bytes" if sent < 0.9 else "it sends as much"
    if hidden > 0.2:
        how += f" and hides {hidden:.0%} of its communication behind computation"
    ours, theirs = best.exposed / best.seconds, ddp.exposed / ddp.seconds
    return f"{how}, so that messages hold its workers up for {ours:.0%} of the run instead of {theirs:.0%}"
