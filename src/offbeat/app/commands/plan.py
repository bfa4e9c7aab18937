"""`offbeat plan`"""

import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from offbeat.among import communicator
from offbeat.app.cli.options import Refused, plain, reading
from offbeat.app.cli.plan import CLUSTER, JOB, MEASURE
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import quality, show
from offbeat.app.commands.join import join_workers, read_launch
from offbeat.base.checks import check_number
from offbeat.base.errors import BadArgument
from offbeat.base.units import (
    as_bytes,
    as_rate,
    as_time,
    parse_count,
    parse_level,
    parse_link,
    parse_seconds,
    parse_straggler,
)  # fmt: skip
from offbeat.comm.communicator import Communicator
from offbeat.plan import Cluster, Cosine, Flat, Job, Plan, Prediction, plan, read
from offbeat.plan.draw import chart, picture
from offbeat.plan.measure import Measured, measure_link, measure_script, measure_task
from offbeat.simulate import Failures, Level, Network
from offbeat.simulate.compute import Compute, Constant, HeavyTailed, Jittered, Late, Recorded, Stragglers
from offbeat.tasks import find_task

HEADINGS = (
    "method", "rounds", "sent", "wall-clock", "±", "messages", "stragglers", "hidden", "busy", "copies",
    "ddp within 5 % from", "ddp as fast at",
)  # fmt: skip
METHODS = (
    "ddp()", "local_sgd(every=8)", "cocod(every=8, delay=4)", "diloco(every=64)", "eager_diloco(every=64)"
)  # fmt: skip
# Options that do nothing beside the first, and options that do nothing without the first.
BESIDE = {
    "--recorded": ("--step", "--jitter", "--tail", "--measure"), "--tail": ("--jitter",),
    "--no-cosine": ("--warmup",), "--script": ("--model", "--data", "--batch"),
}  # fmt: skip
NEEDED = {
    "--failures": ("--restart", "--checkpoint"), "--step": ("--jitter", "--tail"),
    "--link": ("--level", "--reduce"), "--parameters": ("--dtype",),
    "--measure": ("--task", "--model", "--data", "--batch", "--script"),
}  # fmt: skip
ROUNDING = 1e-6  # a smaller share of the run is not a spread
NO_QUALITY = "This predicts time, not quality. Measured losses, compared with ddp(),"


def run(given: SimpleNamespace) -> int:
    """Measure what is to be measured, predict, and print."""
    draw = given.draw
    with reading():
        if draw is not None and draw.suffix.lower() != ".svg":
            raise BadArgument("draw", str(draw), "the plot is written as SVG: name a file that ends in .svg.")
        job, where = _read_file(given.cluster, given.context)
        _refuse_useless(given)
        found = _measure_all(given)
        where = where or _cluster_of(given, found)
        job = job or _job_of(given, found)
    if found.comm is None or found.comm.rank == 0:
        console = show.console()
        with reading(), waiting("planning", quiet=given.quiet) as line:
            result = plan(
                given.methods or METHODS, job, where, watch=lambda name: line.say(f"planning {name}")
            )
            if draw is not None:
                draw.write_text(picture(result))
        if given.json:
            show.print_json(_as_dict(result, found))
        else:
            if given.verbose:
                _print_assumed(console, result)
            _print(console, result, found, draw)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _typed(context: typer.Context, *panels: str) -> list[str]:
    """The options of these panels that the user has typed."""
    return [
        # A switch that is off has been typed as --no-...
        option.secondary_opts[0] if context.params[option.name or ""] is False else option.opts[0]
        for option in context.command.params
        if getattr(option, "rich_help_panel", None) in panels
        and getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
    ]


def _refuse_useless(given: SimpleNamespace) -> None:
    """Refuse options that would do nothing beside others or without them."""
    typed = _typed(given.context, CLUSTER, JOB, MEASURE)
    for beside, useless in BESIDE.items():
        if beside in typed and (both := [option for option in useless if option in typed]):
            raise Refused(f"{beside} and {' and '.join(both)} exclude each other: leave one out.")
    for needed, useless in NEEDED.items():
        if needed not in typed and (alone := [option for option in useless if option in typed]):
            raise Refused(f"{' and '.join(alone)} {'needs' if len(alone) == 1 else 'need'} {needed}.")


def _read_file(path: Path | None, context: typer.Context) -> tuple[Job | None, Cluster | None]:
    """The Job and the Cluster that a Python file defines. Options that contradict the file are refused."""
    if path is None:
        return None, None
    if not path.exists():
        raise BadArgument("cluster", str(path), "there is no such file.")
    with reading("--cluster", str(path)):
        job, cluster = read(path, Job), read(path, Cluster)
    if job is None and cluster is None:
        raise BadArgument("cluster", str(path), "the file defines neither a Cluster nor a Job.")
    panels = [*([CLUSTER, MEASURE] if cluster else []), *([JOB] if job else [])]
    if given := [option for option in _typed(context, *panels) if option != "--cluster"]:
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


def _measure_all(given: SimpleNamespace) -> Found:
    """Time the task or script and the link, as the options ask."""
    if not given.measure:
        return Found()
    if (given.task is None) == (given.script is None):
        raise Refused("--measure needs either --task or --script.")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if given.script is not None:
        path, *arguments = given.script.split()
        step = measure_script(path, arguments)  # first: it may join a group of its own
    if not dist.is_initialized() and read_launch() is not None:  # torchrun or a lab has started workers
        join_workers("nccl" if torch.cuda.is_available() else "gloo")
    comm = communicator()
    if given.task is not None:
        task = find_task(given.task, size=given.model, data=given.data, seed=0)
        step = measure_task(task, comm, batch=given.batch)
    network, points = measure_link(comm) if comm.size > 1 else (None, [])
    return Found(comm, step, step.gather(comm), network, tuple(points))


def _cluster_of(given: SimpleNamespace, found: Found) -> Cluster:
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
        with reading("--recorded", str(given.recorded)):
            compute = Recorded.read(given.recorded)
    elif given.step is not None:
        with reading("--step", given.step):
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
        with reading("--level", level):
            size, uplink = parse_level(level)
            network = replace(network, levels=(*network.levels, Level(size, uplink.rate, uplink.latency)))
    return network


def _job_of(given: SimpleNamespace, found: Found) -> Job:
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
    job = Job(
        given.steps, count, dtype, layers=given.layers, optimizer=given.optimizer, backward=given.backward
    )
    check_number("lr", given.lr, 1e6)
    cosine = Cosine(given.lr, given.steps, given.warmup)
    return replace(job, rate=cosine if given.cosine else Flat(given.lr))


def _as_dict(plan: Plan, found: Found) -> dict[str, Any]:
    link = [{"bytes": b, "seconds": s} for b, s in found.points]
    return {
        "why": plan.why,
        "job": {**asdict(replace(plan.job, rate=Flat(0.0))), "rate": repr(plan.job.rate)},
        "cluster": repr(plan.cluster),
        "measured": None if found.step is None else {**asdict(found.step), "link": link},
        "predictions": [
            {**prediction.as_dict(), "measured_loss": quality.nearest_loss(prediction.method)}
            for prediction in plan.predictions
        ],
    }


def _print(console: Console, plan: Plan, found: Found, draw: Path | None) -> None:
    def tell(text: str) -> None:
        console.print(plain(text), markup=False)

    if found.compute is not None and found.step is not None:
        times = sorted(time for row in found.compute.rows for time in row)
        link = f", the link carries {as_rate(min(found.network.links))}" if found.network is not None else ""
        size = show.count(found.step.parameters, "parameter")
        tell(f"Measured: the median step takes {as_time(times[len(times) // 2])}{link}; {size}.")
    columns = {heading: "fold" if heading == "method" else "right" for heading in HEADINGS}
    title = f"{show.count(plan.job.steps, 'step')} on {show.count(plan.cluster.workers, 'worker')}"
    show.print_table(console, title, columns, [_row(p) for p in plan.predictions])
    for prediction in plan.predictions:
        for note in prediction.notes:
            tell(f"{prediction.method}: {note}.")
    tell(f"\n{plan.why}\n\n{NO_QUALITY} {quality.SETTING}:")
    for line in quality.tell_losses([p.method for p in plan.predictions]):
        for piece in show.wrap(line, console.width, indent=4):
            show.say(console, piece)
    tell("")
    tell("Wall-clock time against link bandwidth, both logarithmic:")
    show.say(console, chart(plan, width=console.width))
    if draw is not None:
        tell(f"\nPlot: {draw}")


def _print_assumed(console: Console, plan: Plan) -> None:
    """Print the run and the cluster, one field on each line."""
    for value in (plan.job, plan.cluster):
        show.say(console, type(value).__name__)
        for field in fields(value):
            show.say(console, f"  {field.name} = {getattr(value, field.name)!r}")
    show.say(console, "")


def _row(p: Prediction) -> list[str]:
    return [
        p.method, f"{p.rounds:,}", as_bytes(p.bytes_sent), as_time(p.seconds),
        as_time(p.spread) if p.spread > ROUNDING * p.seconds else "0",
        *(f"{share / p.seconds:.1%}" for share in (p.exposed, p.waiting)),
        f"{p.hidden / max(1e-12, p.hidden + p.exposed):.0%}", f"{p.utilisation:.1%}", f"{p.copies:.1f}",
        *("-" if bandwidth is None else as_rate(bandwidth) for bandwidth in (p.break_even, p.ddp_needs)),
    ]  # fmt: skip
