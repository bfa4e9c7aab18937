"""The cluster and the job that the options or the file of `offbeat plan` describe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from offbeat.app.cli.plan_measure import Found
from offbeat.app.cli.plan_options import CLUSTER, JOB, MEASURE
from offbeat.app.cli.refusal import option
from offbeat.base.checks import check_number
from offbeat.base.units import (
    parse_count,
    parse_level,
    parse_link,
    parse_seconds,
    parse_straggler,
)
from offbeat.plan import Cluster, Cosine, Flat, Job, read
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


def read_file(path: Path | None, context: typer.Context) -> tuple[Job | None, Cluster | None]:
    """The Job and the Cluster that a Python file defines. Options that contradict the file are refused."""
    if path is None:
        return None, None
    job, cluster = read(path, Job), read(path, Cluster)
    if job is None and cluster is None:
        raise ValueError(f"{path} defines neither a Cluster nor a Job.")
    panels = [*([CLUSTER, MEASURE] if cluster else []), *([JOB] if job else [])]
    given = [
        option.opts[0]
        for option in context.command.params
        if getattr(option, "rich_help_panel", None) in panels
        and getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
        and option.opts[0] != "--cluster"
    ]
    if given:
        kinds = " and a ".join(type(value).__name__ for value in (cluster, job) if value)
        raise ValueError(f"{path} defines a {kinds}: leave out {', '.join(given)}, or change the file.")
    return job, cluster


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
        compute = _parse_step(step, jitter, tail)
    for text in straggler:
        late = parse_straggler(text, workers=workers)
        if compute is not None and late.share is not None:
            compute = Stragglers(compute, late.share, late.delay, late.seed)
        elif compute is not None and late.rank is not None:
            compute = Late(compute, late.rank, late.delay, late.every)
    return compute


def _parse_step(step: str, jitter: float, tail: float | None) -> Compute:
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
    needed = {"--workers": workers, "--step": compute, "--link": network}
    missing = [name for name, value in needed.items() if value is None]
    if missing or workers is None or compute is None or network is None:
        also = " (or use torchrun to measure the link)" if found.comm is not None else ""
        raise ValueError(f"A cluster needs {', '.join(missing)}{also}, or a file with --cluster.")
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
        raise ValueError("The length of the run is missing: give --steps.")
    if found.step is not None and parameters is None:
        parameters, dtype = str(found.step.parameters), found.step.dtype
    if parameters is None:
        raise ValueError("The size of the model is missing: give --parameters, such as 124M.")
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
