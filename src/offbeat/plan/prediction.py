"""Predict the time and the bytes of one method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from offbeat.base.checks import replace_nonfinite
from offbeat.engine.exchange import Exchange
from offbeat.methods.expression import method
from offbeat.plan.amount import Amount
from offbeat.plan.forecast import Forecast, Spent
from offbeat.plan.job import Cluster, Job
from offbeat.plan.probe import Build, Seen, probe
from offbeat.plan.unroll import Timeline, unroll
from offbeat.simulate import Network


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
    hidden: float  # communication that nobody waits for
    failing: float  # failures, restarts and repeated work
    copies: float  # of the model, kept by the method
    curve: tuple[tuple[float, float], ...]  # bandwidth and seconds
    break_even: float | None = None  # with a faster link, ddp is at most 5 % slower
    ddp_needs: float | None = None  # the bandwidth at which ddp is as fast as this method is now
    notes: tuple[str, ...] = ()

    @property
    def utilisation(self) -> float:
        """The share of the run in which a worker computes."""
        return self.computing / self.seconds if math.isfinite(self.seconds) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Infinite numbers are None."""
        fields = {**asdict(self), "utilisation": self.utilisation}
        fields["curve"] = [{"bandwidth": b, "seconds": s} for b, s in self.curve]
        fields["notes"] = list(self.notes)
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
    build = method(expression)
    seen, job, notes = _probe_or_sgd(build, job, cluster)
    course = unroll(seen.sync.parts, job)
    _must_meet(seen, course, job)
    networks = varied(cluster)
    forecast = Forecast(seen, course, job, cluster, networks)
    spent = forecast.spent()
    amount = Amount(seen, course, forecast.closing(), cluster.workers, forecast.among)
    totals = [_with_failures(float(mean), cluster) for mean in spent.mean]
    here = totals[0]
    rushed = sum(waitfree.held(step) for waitfree in seen.waitfree_parts for step in range(job.steps))
    return Prediction(
        method=expression.strip(),
        rounds=sum(course.rounds.values()) + seen.periodic.rounds(job.steps) + rushed,
        bytes_sent=amount.bytes_sent(),
        seconds=here,
        spread=_spread(spent, cluster),
        computing=float(spent.computed[0]),
        waiting=float(spent.skewed[0]),
        exposed=float(spent.exposed[0]),
        hidden=max(0.0, float(spent.flown[0] - spent.exposed[0])),
        failing=here - float(spent.mean[0]),
        copies=seen.copies,
        curve=tuple(sorted(zip(map(varied_link, networks[1:]), totals[1:], strict=True))),
        notes=(*notes, *_notes(seen)),
    )


def _probe_or_sgd(build: Build, job: Job, cluster: Cluster) -> tuple[Seen, Job, tuple[str, ...]]:
    """Probe the method; with SGD if it refuses the job's optimizer."""
    try:
        return probe(build, job, cluster.workers), job, ()
    except (TypeError, ValueError):
        if job.optimizer != "adamw":
            raise
        other = replace(job, optimizer="momentum")
        try:
            return probe(build, other, cluster.workers), other, ("it needs SGD",)
        except (TypeError, ValueError):
            pass
        raise


def _notes(seen: Seen) -> tuple[str, ...]:
    notes = []
    for part in seen.sync.parts:
        if isinstance(part, Exchange) and part.when.needs:
            notes.append(
                f"its period follows the {' and '.join(sorted(part.when.needs))}; planned as it starts"
            )
    return tuple(dict.fromkeys(notes))


def _must_meet(seen: Seen, course: Timeline, job: Job) -> None:
    if not seen.periodic and not any(course.rounds.values()):
        raise ValueError(
            f"{seen.sync!r}: there is no round in {job.steps} steps: shorten the period or lengthen the run."
        )


def varied_link(network: Network) -> float:
    """The bandwidth that the curve varies."""
    return network.levels[-1].bandwidth if network.levels else min(network.links)


def varied(cluster: Cluster) -> list[Network]:
    """The cluster's network, then others whose outermost link is slower or faster."""
    network = cluster.network
    here = varied_link(network)
    if cluster.workers == 1:
        return [network]
    points = 13 if cluster.workers <= 10_000 else 7
    middle = 1.25e8 if math.isinf(here) else here
    factors = [10 ** (6 * i / (points - 1) - 3) for i in range(points)]
    return [network, *(with_link(network, middle * factor) for factor in factors)]


def with_link(network: Network, bandwidth: float) -> Network:
    """The network with another outermost link; of several links, the slowest gets this bandwidth."""
    if network.levels:
        return replace(
            network, levels=(*network.levels[:-1], replace(network.levels[-1], bandwidth=bandwidth))
        )
    if isinstance(network.bandwidth, tuple):
        ratio = bandwidth / min(network.links)
        return replace(network, bandwidth=tuple(link * ratio for link in network.links))
    return replace(network, bandwidth=bandwidth)


def _with_failures(seconds: float, cluster: Cluster) -> float:
    """Everyone waits for a failed worker: the restart, and half the time between checkpoints."""
    failures = cluster.failures
    return seconds * (1 + cluster.workers * failures.per_hour / 3600 * failures.cost)


def _spread(spent: Spent, cluster: Cluster) -> float:
    failures, seconds = cluster.failures, float(spent.mean[0])
    number = seconds * cluster.workers * failures.per_hour / 3600
    squares = failures.cost**2 + failures.checkpoint**2 / 12
    return math.sqrt(float(spent.variance[0]) + number * squares)
