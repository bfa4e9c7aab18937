"""Predict the time and the bytes of methods: which is fastest, and why."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from offbeat.base.checks import replace_nonfinite
from offbeat.engine.exchange import Exchange
from offbeat.methods.expression import Call, method
from offbeat.plan.forecast import Forecast, bytes_sent, unroll
from offbeat.plan.job import Cluster, Job
from offbeat.plan.overlap import find_buckets
from offbeat.plan.periods import fix_period
from offbeat.plan.probe import MethodProfile, probe
from offbeat.simulate import Network
from offbeat.waitfree import CodedGradients

_SLACK = 1.05  # counts as equally fast for the break-even bandwidth
_LITTLE = 0.1  # a share of the run too small to be worth saving


@dataclass(frozen=True)
class Prediction:
    """One method on one cluster: seconds of the whole run, bytes of one worker. The curve varies the
    bandwidth of the workers' own links, or of the outermost uplinks, in bytes per second."""

    method: str
    rounds: int
    bytes_sent: int
    seconds: float
    spread: float  # standard deviation of the seconds over runs
    computing: float  # mean over the workers
    waiting: float  # for slower workers
    exposed: float  # for messages
    hidden: float  # communication that no worker waits for
    failing: float  # failures, restarts and repeated work
    copies: float  # of the model, kept by the method
    curve: tuple[tuple[float, float], ...]  # bandwidth and seconds
    break_even: float | None = None  # with a faster link, ddp is at most 5 % slower
    ddp_needs: float | None = None  # the bandwidth at which ddp would be as fast as this method is here
    notes: tuple[str, ...] = ()

    @property
    def utilisation(self) -> float:
        """The share of the run in which a worker computes."""
        return self.computing / self.seconds if math.isfinite(self.seconds) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Infinite numbers are None."""
        curve = [{"bandwidth": b, "seconds": s} for b, s in self.curve]
        fields = {**asdict(self), "utilisation": self.utilisation, "curve": curve}
        return {key: replace_nonfinite(value) for key, value in fields.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """The tensors fit a cache: a second thread costs more processor time than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def predict(expression: str, job: Job, cluster: Cluster) -> Prediction:
    """Record the method on a small model, unroll its schedules, and run all clocks through it."""
    call = method(expression)
    if fixed := fix_period(call, cluster, lambda call: _exposed_share(call, job, cluster)):
        found = predict(str(fixed[0]), job, cluster)
        return replace(found, method=expression.strip(), notes=(*found.notes, fixed[1]))
    profile, job, notes = _probe_or_sgd(call, job, cluster)
    if (load := max(part.load for part in profile.sync.parts)) > 1:
        cluster = replace(cluster, compute=cluster.compute.loaded(load))
    timeline, networks = unroll(profile.sync.parts, job), _vary(cluster)
    rounds = sum(timeline.rounds.values())
    if not (profile.periodic or profile.waitfree or rounds):
        why = f"there is no round in {job.steps} steps: shorten the period or lengthen the run."
        raise ValueError(f"{profile.sync!r}: {why}")
    rounds += sum(n * profile.periodic.reports[step] for step, n in profile.periodic.count(job.steps).items())
    rounds += sum(profile.count_sidecar_rounds(place, job.steps).total() for place in profile.waitfree)
    forecast = Forecast(profile, timeline, job, cluster, networks)
    spent = forecast.spent()
    # Everyone waits for a failed worker: the restart, and half the time between checkpoints.
    failures, mean = cluster.failures, float(spent.mean[0])
    slower = 1 + cluster.workers * failures.per_hour / 3600 * failures.cost
    totals = [seconds * slower for seconds in spent.mean.tolist()]
    number = mean * cluster.workers * failures.per_hour / 3600
    squares = failures.cost**2 + failures.checkpoint**2 / 12
    return Prediction(
        method=expression.strip(),
        rounds=rounds,
        bytes_sent=bytes_sent(profile, timeline, forecast.closing),
        seconds=totals[0],
        spread=math.sqrt(float(spent.variance[0]) + number * squares),
        computing=float(spent.computed[0]),
        waiting=float(spent.skewed[0]),
        exposed=float(spent.exposed[0]),
        hidden=max(0.0, float(spent.flown[0] - spent.exposed[0])),
        failing=totals[0] - mean,
        copies=profile.copies,
        curve=tuple(sorted(zip(map(varied_link, networks[1:]), totals[1:], strict=True))),
        notes=notes,
    )


def _exposed_share(call: Call, job: Job, cluster: Cluster) -> float:
    """Return the exposed share of the time of a run that is long enough to have rounds."""
    every = call.arguments["every"]
    found = predict(str(call), replace(job, steps=max(job.steps, 4 * every)), cluster)
    return found.exposed / found.seconds


def _probe_or_sgd(call: Call, job: Job, cluster: Cluster) -> tuple[MethodProfile, Job, tuple[str, ...]]:
    """Probe the method, with SGD if it refuses the job's optimizer. Returns that job, and notes."""
    notes = []
    try:
        profile = probe(call, job, cluster.workers)
    except (TypeError, ValueError) as error:
        if job.optimizer != "adamw":
            raise
        job, notes = replace(job, optimizer="momentum"), ["it needs SGD"]
        try:
            profile = probe(call, job, cluster.workers)
        except (TypeError, ValueError):
            raise error from None
    for part in profile.sync.parts:
        if isinstance(part, Exchange) and (needs := " and ".join(sorted(part.when.needs))):
            notes.append(f"its period follows the {needs}; planned as it starts")
        if isinstance(part, Exchange) and part.live.early and not part.delay:
            notes.append(_overlap_note(part, job))
        if part.load > 1:
            notes.append(f"each worker computes {part.load} batches per step; a step has as many as ddp's")
        if isinstance(part, CodedGradients) and part.dynamic:
            notes.append("planned with the clusters that it starts with")
    return profile, job, tuple(dict.fromkeys(notes))


def _overlap_note(part: Exchange, job: Job) -> str:
    if buckets := find_buckets(part, job):
        during = f"during the backward pass, which takes {job.backward:.0%} of a step (--backward)"
        return f"its gradients leave in {len(buckets)} parts {during}"
    return "its gradients leave after the backward pass"


def varied_link(network: Network) -> float:
    """Return the bandwidth that the curve varies."""
    return network.levels[-1].bandwidth if network.levels else min(network.links)


def _vary(cluster: Cluster) -> list[Network]:
    """Return the cluster's network, then others whose outermost link is slower or faster."""
    network, here = cluster.network, varied_link(cluster.network)
    if cluster.workers == 1:
        return [network]
    points = 13 if cluster.workers <= 10_000 else 7
    middle = 1.25e8 if math.isinf(here) else here
    links = [middle * 10 ** (6 * i / (points - 1) - 3) for i in range(points)]
    if network.levels:
        *inner, outermost = network.levels
        uplinks = [replace(outermost, bandwidth=link) for link in links]
        return [network, *(replace(network, levels=(*inner, uplink)) for uplink in uplinks)]
    if isinstance(network.bandwidth, tuple):  # the slowest link gets the varied bandwidth
        ratios = [link / here for link in links]
        each = [tuple(own * ratio for own in network.bandwidth) for ratio in ratios]
        return [network, *(replace(network, bandwidth=bandwidths) for bandwidths in each)]
    return [network, *(replace(network, bandwidth=link) for link in links)]


@dataclass(frozen=True)
class Plan:
    """Predictions, fastest first, and one sentence on why the first wins."""

    job: Job
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    why: str


def plan(
    methods: Sequence[str], job: Job, cluster: Cluster, *, watch: Callable[[str], None] = lambda method: None
) -> Plan:
    """Predict the time of each method, and rank them. `watch` is told each method before it is planned.

    job = Job(steps=10_000, parameters=124_000_000)
    cluster = Cluster(8, Jittered(0.5), Network(latency=0.01, bandwidth=1.25e8))
    plan(["ddp()", "local_sgd(every=8)", "diloco(every=64)"], job, cluster).why
    """
    if not methods:
        raise ValueError("plan(methods=[]): name at least one method.")
    calls = {str(method(text)): text for text in methods}  # `ddp` and `ddp()` are one method
    predicted = {}
    for call, text in calls.items():
        watch(text)
        predicted[call] = predict(text, job, cluster)
    ddp = predicted.get("ddp()") or predict("ddp()", job, cluster)
    ranked = sorted((_compare(p, ddp) for p in predicted.values()), key=lambda p: p.seconds)
    return Plan(job, cluster, tuple(ranked), _why(ranked[0], ddp, alone=len(ranked) == 1))


def _compare(ours: Prediction, ddp: Prediction) -> Prediction:
    if ours is ddp:
        return ours
    gain = [(b, theirs / own) for (b, own), (_, theirs) in zip(ours.curve, ddp.curve, strict=True)]
    return replace(ours, break_even=_crossing(gain, _SLACK), ddp_needs=_crossing(ddp.curve, ours.seconds))


def _crossing(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the bandwidth at which a falling curve crosses a level, if any. Time goes with its inverse."""
    for (left, above), (right, below) in pairwise(curve):
        if above > level >= below:
            share = (above - level) / (above - below)
            return 1 / (1 / left + share * (1 / right - 1 / left))
    return None


def _why(best: Prediction, ddp: Prediction, *, alone: bool) -> str:
    ratio = ddp.seconds / best.seconds
    if ratio < 0.98:
        return f"None of these: ddp() would be {1 / ratio:.2f} times as fast as {best.method}."
    if best is not ddp and ratio >= 1.02:
        return f"{best.method} is {ratio:.2f} times as fast as ddp(): {_reason(best, ddp)}."
    idle, who = (ddp.exposed + ddp.waiting) / ddp.seconds, "it" if best is ddp else "ddp()"
    if little := idle < _LITTLE:
        waits = f"waits for messages in only {ddp.exposed / ddp.seconds:.0%} of the run"
        advice = "so communicating less often saves little"
    else:
        waits = f"waits for messages or slower workers in {idle:.0%} of the run"
        advice = "so a method that communicates less often may save some of it"
    if best is ddp and alone:
        return f"{best.method} {waits}, {advice}."
    praise = "is as good as any:" if little else "is as good as any of these, but"
    return f"{best.method} {praise} {who} {waits}, {advice}."


def _reason(best: Prediction, ddp: Prediction) -> str:
    """Say where most of the difference comes from."""
    if ddp.waiting - best.waiting > ddp.exposed - best.exposed:
        ours, theirs = best.waiting / best.seconds, ddp.waiting / ddp.seconds
        return f"its workers wait {ours:.0%} of the run for slower ones instead of {theirs:.0%}"
    sent = best.bytes_sent / max(1, ddp.bytes_sent)
    hidden = best.hidden / max(1e-12, best.hidden + best.exposed)
    how = f"it sends {sent:.1%} of the bytes" if sent < 0.9 else "it sends as much"
    if hidden > 0.2:
        how += f" and hides {hidden:.0%} of its communication behind computation"
    ours, theirs = best.exposed / best.seconds, ddp.exposed / ddp.seconds
    return f"{how}, so that messages hold its workers up for {ours:.0%} of the run instead of {theirs:.0%}"
