"""The cluster and the job that the options of `offbeat plan` describe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.app.cli.measured import Found
from offbeat.app.cli.refusal import option
from offbeat.base.checks import check_number
from offbeat.base.units import (
    parse_count,
    parse_level,
    parse_link,
    parse_seconds,
    parse_straggler,
)
from offbeat.plan import Cluster, Cosine, Flat, Job
from offbeat.simulate import (
    Compute,
    Constant,
    Failures,
    HeavyTailed,
    Jittered,
    Level,
    Network,
    Recorded,
    Stragglers,
)
from offbeat.simulate.compute import Late


def compute_of(
    found: Found,
    step: str | None,
    jitter: float,
    tail: float | None,
    straggler: list[str],
    workers: int | None,
    recorded: Path | None,
) -> Compute | None:
    compute: Compute | None = found.compute
    if recorded is not None:
        compute = Recorded.read(recorded)
    elif step is not None:
        compute = _steps(step, jitter, tail)
    for text in straggler:
        late = parse_straggler(text, workers=workers)
        if compute is not None and late.share is not None:
            compute = Stragglers(compute, late.share, late.delay, late.seed)
        elif compute is not None and late.rank is not None:
            compute = Late(compute, late.rank, late.delay, late.every)
    return compute


def _steps(step: str, jitter: float, tail: float | None) -> Compute:
    with option("--step", step):
        plain = Constant(parse_seconds(step))
    if tail is not None:
        with option("--tail", tail):
            return HeavyTailed(plain.step, tail)
    if jitter:
        with option("--jitter", jitter):
            return Jittered(plain.step, jitter)
    return plain


def network_of(found: Found, link: str | None, levels: list[str], reduce: Any) -> Network | None:
    if link is None:
        return found.network if not levels else None
    with option("--link", link):
        own = parse_link(link)
        network = Network(own.latency, own.rate)
    with option("--reduce", reduce):
        network = replace(network, reduce=reduce)
    for level in levels:
        with option("--level", level):
            size, uplink = parse_level(level)
            added = Level(size, uplink.rate, uplink.latency)
            network = replace(network, levels=(*network.levels, added))
    return network


def failures_of(per_hour: float, restart: str, checkpoint: str) -> Failures:
    with option("--failures", per_hour):
        failures = Failures(per_hour)
    with option("--restart", restart):
        failures = replace(failures, restart=parse_seconds(restart))
    with option("--checkpoint", checkpoint):
        return replace(failures, checkpoint=parse_seconds(checkpoint))


def cluster_of(
    found: Found,
    *,
    workers: int | None,
    compute: Compute | None,
    network: Network | None,
    failures: Failures,
) -> Cluster:
    if workers is None:
        workers = found.comm.size if found.comm is not None and found.comm.size > 1 else None
    missing = [
        name
        for name, value in (("--workers", workers), ("--step", compute), ("--link", network))
        if value is None
    ]
    if missing or workers is None or compute is None or network is None:
        also = " (or start it with torchrun, to measure the link)" if found.comm is not None else ""
        raise ValueError(f"A cluster needs {', '.join(missing)}{also}, or a file by --cluster.")
    with option("--workers", workers):
        return Cluster(workers, compute, network, failures)


def job_of(
    found: Found,
    steps: int | None,
    parameters: str | None,
    dtype: Any,
    layers: int,
    optimizer: Any,
    lr: float,
    warmup: int,
    cosine: bool,
) -> Job:
    if steps is None:
        raise ValueError("How long is the run? Give --steps.")
    if found.step is not None and parameters is None:
        parameters, dtype = str(found.step.parameters), found.step.dtype
    if parameters is None:
        raise ValueError("How large is the model? Give --parameters, such as 124M.")
    with option("--parameters", parameters):
        count = parse_count(parameters)
    given = {"steps": steps, "parameters": count, "dtype": dtype, "layers": layers, "optimizer": optimizer}
    for name, value in given.items():
        with option(f"--{name}", value):
            Job(**{"steps": 1, "parameters": 1, name: value})
    check_number("lr", lr, 1e6)
    with option("--warmup", warmup):
        falling = Cosine(lr, steps, warmup)
    return Job(**given, rate=falling if cosine else Flat(lr))
