"""The cluster and the job that the options, the file or the measurements of `offbeat plan` describe."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import typer

from offbeat.among import communicator
from offbeat.app.cli.refusal import Refused, option
from offbeat.base.checks import check_number
from offbeat.base.units import parse_count, parse_level, parse_link, parse_seconds, parse_straggler
from offbeat.comm.communicator import Communicator
from offbeat.plan import Cluster, Cosine, Flat, Job, read
from offbeat.plan.measure import Measured, measure_link, measure_script, measure_task
from offbeat.simulate import Failures, Level, Network
from offbeat.simulate.compute import Compute, Constant, HeavyTailed, Jittered, Late, Recorded, Stragglers
from offbeat.tasks import find_task

CLUSTER, JOB, MEASURE = "Cluster", "Training run", "Measurement"  # panels of the help


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


@dataclass
class Found:
    """The measurements, if any, and the workers that took part."""

    comm: Communicator | None = None
    step: Measured | None = None
    compute: Recorded | None = None
    network: Network | None = None
    points: tuple[tuple[int, float], ...] = ()


def measure_all(given: SimpleNamespace) -> Found:
    """Time the task or script and the link, as the options ask."""
    if not given.measure:
        if given.task or given.script:
            raise Refused("--task and --script need --measure.")
        return Found()
    if (given.task is None) == (given.script is None):
        raise Refused("--measure needs either --task or --script.")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if given.script is not None:
        path, *arguments = given.script.split()
        step = measure_script(path, arguments)  # first: it may join a group of its own
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:  # torchrun or a lab has started workers
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    comm = communicator()
    if given.task is not None:
        task = find_task(given.task, size=given.model, data=given.data, seed=0)
        step = measure_task(task, comm, batch=given.batch)
    network, points = measure_link(comm) if comm.size > 1 else (None, [])
    return Found(comm, step, step.gather(comm), network, tuple(points))


def cluster_of(given: SimpleNamespace, found: Found) -> Cluster:
    """The cluster that the options describe, with measured values where options are missing."""
    workers, compute, network = given.workers, _compute_of(given, found), _network_of(given, found)
    if workers is None and found.comm is not None and found.comm.size > 1:
        workers = found.comm.size
    restart, checkpoint = (parse_seconds(getattr(given, name), name) for name in ("restart", "checkpoint"))
    failures = Failures(given.failures, restart, checkpoint)
    needed = {"--workers": workers, "--step": compute, "--link": network}
    missing = [name for name, value in needed.items() if value is None]
    if missing or compute is None or network is None:
        also = " (or use torchrun to measure the link)" if found.comm is not None else ""
        raise ValueError(f"A cluster needs {', '.join(missing)}{also}, or a file with --cluster.")
    return Cluster(workers, compute, network, failures)


def _compute_of(given: SimpleNamespace, found: Found) -> Compute | None:
    compute: Compute | None = found.compute
    if given.recorded is not None:
        compute = Recorded.read(given.recorded)
    elif given.step is not None:
        with option("--step", given.step):
            compute = constant = Constant(parse_seconds(given.step))
        if given.tail is not None:
            compute = HeavyTailed(constant.step, given.tail)
        elif given.jitter:
            compute = Jittered(constant.step, given.jitter)
    for text in given.straggler or []:
        late = parse_straggler(text, workers=given.workers)
        if compute is not None and late.share is not None:
            compute = Stragglers(compute, late.share, late.delay, late.seed)
        elif compute is not None and late.rank is not None:
            compute = Late(compute, late.rank, late.delay, late.every)
    return compute


def _network_of(given: SimpleNamespace, found: Found) -> Network | None:
    if given.link is None:
        return found.network if not given.level else None
    link = parse_link(given.link)
    network = Network(link.latency, link.rate, reduce=given.reduce)
    for level in given.level or []:
        with option("--level", level):
            size, uplink = parse_level(level)
            network = replace(network, levels=(*network.levels, Level(size, uplink.rate, uplink.latency)))
    return network


def job_of(given: SimpleNamespace, found: Found) -> Job:
    """The job that the options describe, with the measured model if --parameters is missing."""
    if given.steps is None:
        raise ValueError("The length of the run is missing: give --steps.")
    dtype = given.dtype
    if given.parameters is not None:
        count = parse_count(given.parameters, "parameters")
    elif found.step is not None:
        count, dtype = found.step.parameters, found.step.dtype
    else:
        raise ValueError("The size of the model is missing: give --parameters, such as 124M.")
    job = Job(given.steps, count, dtype, layers=given.layers, optimizer=given.optimizer)
    check_number("lr", given.lr, 1e6)
    cosine = Cosine(given.lr, given.steps, given.warmup)
    return replace(job, rate=cosine if given.cosine else Flat(given.lr))
