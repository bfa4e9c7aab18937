"""`offbeat plan`"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from offbeat.cli import show
from offbeat.cli.refusal import Refused, reading
from offbeat.comm import Communicator
from offbeat.peers import communicator
from offbeat.plan import Cluster, Cosine, Flat, Job, Plan, Prediction, plan, read
from offbeat.plan.draw import chart, picture
from offbeat.plan.measure import Measured, gathered, measure_link, measure_script, measure_task
from offbeat.plan.units import as_bytes, as_rate, as_time, parse_count, parse_level, parse_link, parse_seconds
from offbeat.simulate import Compute, Constant, Failures, HeavyTailed, Jittered, Network, Recorded, Stragglers
from offbeat.tasks import find_task

METHODS = (
    "ddp()",
    "local_sgd(every=8)",
    "cocod(every=8, delay=4)",
    "diloco(every=64)",
    "eager_diloco(every=64)",
)

_CLUSTER, _JOB, _MEASURE, _SHOWN = "The cluster", "The run", "Measuring", "What is shown"


def plan_command(
    methods: Annotated[list[str] | None, typer.Argument(help="Methods, as expressions.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many.", rich_help_panel=_CLUSTER)] = None,
    step: Annotated[
        str | None, typer.Option(help="A worker's step: 250ms.", rich_help_panel=_CLUSTER)
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Its deviation, as a share of it.", rich_help_panel=_CLUSTER)
    ] = 0.0,
    tail: Annotated[
        float | None, typer.Option(help="A Pareto tail instead; 3 is mild.", rich_help_panel=_CLUSTER)
    ] = None,
    straggler: Annotated[
        str | None, typer.Option(help="CHANCE,DELAY of a late step.", rich_help_panel=_CLUSTER)
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="Steps of a real run, as JSON.", rich_help_panel=_CLUSTER)
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Each worker's link: 1gbit or 1gbit,5ms.", rich_help_panel=_CLUSTER)
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="Groups that share an uplink, innermost first: 8:100gbit,5us.", rich_help_panel=_CLUSTER
        ),
    ] = None,
    reduce: Annotated[
        str, typer.Option(help="ring, tree, direct or ideal.", rich_help_panel=_CLUSTER)
    ] = "ring",
    failures: Annotated[
        float, typer.Option(help="Failures per worker and hour.", rich_help_panel=_CLUSTER)
    ] = 0.0,
    restart: Annotated[str, typer.Option(help="Until it is back.", rich_help_panel=_CLUSTER)] = "60s",
    checkpoint: Annotated[
        str, typer.Option(help="From one checkpoint to the next.", rich_help_panel=_CLUSTER)
    ] = "0s",
    cluster: Annotated[
        Path | None,
        typer.Option(help="A Python file that defines a Cluster, a Job or both.", rich_help_panel=_CLUSTER),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each worker.", rich_help_panel=_JOB)] = None,
    parameters: Annotated[str | None, typer.Option(help="Trainable: 124M.", rich_help_panel=_JOB)] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters.", rich_help_panel=_JOB)] = "float32",
    layers: Annotated[int, typer.Option(help="Of the model.", rich_help_panel=_JOB)] = 12,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw.", rich_help_panel=_JOB)] = "adamw",
    lr: Annotated[float, typer.Option(help="The (highest) rate.", rich_help_panel=_JOB)] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of rising rate.", rich_help_panel=_JOB)] = 0,
    cosine: Annotated[bool, typer.Option(help="The rate falls as a cosine.", rich_help_panel=_JOB)] = True,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time the real step, and under torchrun the link.", rich_help_panel=_MEASURE
        ),
    ] = False,
    task: Annotated[
        str | None, typer.Option(help="The task whose step is timed.", rich_help_panel=_MEASURE)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its size.", rich_help_panel=_MEASURE)] = None,
    data: Annotated[Path | None, typer.Option(help="Its data.", rich_help_panel=_MEASURE)] = None,
    batch: Annotated[int | None, typer.Option(help="Its batch size.", rich_help_panel=_MEASURE)] = None,
    script: Annotated[
        str | None, typer.Option(help="A training script, with arguments, instead.", rich_help_panel=_MEASURE)
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Write time against bandwidth to this .svg.", rich_help_panel=_SHOWN)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=_SHOWN)
    ] = False,
) -> None:
    """Predict the wall-clock of methods on a cluster you describe, before you rent it.

    Nothing is trained: the methods are built among imagined workers, their schedules unrolled, and the
    clocks of all workers run through what they send and wait for.

    Examples:

        offbeat plan --workers 8 --step 250ms --jitter 0.05 --parameters 124M --link 1gbit,5ms --steps 10000

        offbeat plan 'ddp()' 'diloco(every=100)' --cluster mine.py --draw plan.svg

        torchrun --nproc-per-node 4 -m offbeat plan --measure --task digits --steps 1000
    """
    found = _measured(measure, task, model, data, batch, script)
    with reading():
        job, where = _files(cluster)
        where = where or _cluster(
            found,
            workers=workers,
            compute=_compute(found, step, jitter, tail, straggler, recorded),
            network=_network(found, link, level or [], reduce),
            failures=Failures(failures, parse_seconds(restart), parse_seconds(checkpoint)),
        )
        job = job or _job(found, steps, parameters, dtype, layers, optimizer, lr, warmup, cosine)
    if not found.leads:
        found.leave()
        return
    console = show.console()
    with reading(), console.status("planning", spinner="dots"):
        made = plan(methods or METHODS, job, where)
    if draw is not None:
        with reading():
            draw.write_text(picture(made))
    if json:
        show.as_json(_told(made, found))
    else:
        _print(console, made, found, draw)
    found.leave()


@dataclass
class _Found:
    """What was measured, if anything, and with whom."""

    comm: Communicator | None = None
    step: Measured | None = None
    compute: Recorded | None = None
    network: Network | None = None
    points: tuple[tuple[int, float], ...] = ()

    @property
    def leads(self) -> bool:
        return self.comm is None or self.comm.rank == 0

    def leave(self) -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def _measured(
    measure: bool,
    task: str | None,
    model: str | None,
    data: Path | None,
    batch: int | None,
    script: str | None,
) -> _Found:
    if not measure:
        if task or script:
            raise Refused("--task and --script are there to be measured: add --measure.")
        return _Found()
    if (task is None) == (script is None):
        raise Refused("--measure times one thing: give either --task or --script.")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with reading():
        if script is not None:
            path, *arguments = script.split()
            step = measure_script(path, arguments)  # before anything else: it may join a group of its own
        comm = _joined()
        if task is not None:
            step = measure_task(find_task(task, size=model, data=data, seed=0), comm, batch=batch)
        network, points = measure_link(comm) if comm.size > 1 else (None, [])
    return _Found(comm, step, gathered(comm, step), network, tuple(points))


def _joined() -> Communicator:
    """The workers that torchrun, or a lab, has started."""
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return communicator()


def _files(path: Path | None) -> tuple[Job | None, Cluster | None]:
    if path is None:
        return None, None
    job, cluster = read(path, Job), read(path, Cluster)
    if job is None and cluster is None:
        raise ValueError(f"{path} defines neither a Cluster nor a Job.")
    return job, cluster


def _compute(
    found: _Found,
    step: str | None,
    jitter: float,
    tail: float | None,
    straggler: str | None,
    recorded: Path | None,
) -> Compute | None:
    compute: Compute | None = found.compute
    if recorded is not None:
        compute = Recorded.read(recorded)
    elif step is not None:
        seconds = parse_seconds(step)
        if tail is not None:
            compute = HeavyTailed(seconds, tail)
        else:
            compute = Jittered(seconds, jitter) if jitter else Constant(seconds)
    if straggler is None or compute is None:
        return compute
    chance, _, delay = straggler.partition(",")
    try:
        return Stragglers(compute, float(chance), parse_seconds(delay))
    except ValueError as error:
        raise ValueError(
            f"--straggler {straggler}: write CHANCE,DELAY such as 0.03,320ms ({error})"
        ) from None


def _network(found: _Found, link: str | None, levels: list[str], reduce: Any) -> Network | None:
    if link is None:
        return found.network if not levels else None
    bandwidth, latency = parse_link(link)
    return Network(latency, bandwidth, reduce, tuple(map(parse_level, levels)))


def _cluster(
    found: _Found,
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
    return Cluster(workers, compute, network, failures)


def _job(
    found: _Found,
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
    rate = Cosine(lr, steps, warmup) if cosine and steps > warmup else Flat(lr)
    return Job(steps, parse_count(parameters), dtype, rate, optimizer, layers)


def _told(made: Plan, found: _Found) -> dict[str, Any]:
    measured = None
    if found.step is not None:
        points = [{"bytes": b, "seconds": s} for b, s in found.points]
        measured = {**asdict(found.step), "link": points}
    return {
        "why": made.why,
        "job": {**asdict(replace(made.job, rate=Flat(0.0))), "rate": repr(made.job.rate)},
        "cluster": repr(made.cluster),
        "measured": measured,
        "predictions": [prediction.as_dict() for prediction in made.predictions],
    }


def _print(console: Any, made: Plan, found: _Found, draw: Path | None) -> None:
    if found.compute is not None and found.step is not None:
        times = sorted(time for row in found.compute.rows for time in row)
        told = f"Measured: a step takes {as_time(times[len(times) // 2])} in the middle"
        if found.network is not None:
            told += f", the link carries {as_rate(min(found.network.links))}"
        console.print(told + f"; {found.step.parameters:,} parameters.", markup=False)
    columns = {
        "method": "fold",
        "rounds": "right",
        "sent": "right",
        "wall-clock": "right",
        "±": "right",
        "messages": "right",
        "stragglers": "right",
        "hidden": "right",
        "busy": "right",
        "copies": "right",
        "ddp within 5 % from": "right",
        "ddp as fast at": "right",
    }
    title = f"{made.job.steps:,} steps on {made.cluster.workers:,} workers"
    console.print(show.table(title, columns, [_row(p) for p in made.predictions]))
    for prediction in made.predictions:
        for note in prediction.notes:
            console.print(f"{prediction.method}: {note}.", markup=False)
    console.print("\n" + made.why + "\n", markup=False)
    console.print("Wall-clock against the link's bandwidth, both logarithmic:", markup=False)
    console.print(chart(made), markup=False)
    if draw is not None:
        console.print(f"\nDrawn to {draw}.", markup=False)


def _row(p: Prediction) -> list[str]:
    def link(bandwidth: float | None) -> str:
        return "-" if bandwidth is None else as_rate(bandwidth)

    return [
        p.method,
        f"{p.rounds:,}",
        as_bytes(p.bytes_sent),
        as_time(p.seconds),
        as_time(p.spread) if p.spread else "0",
        f"{p.exposed / p.seconds:.1%}",
        f"{p.waiting / p.seconds:.1%}",
        f"{p.hidden / max(1e-12, p.hidden + p.exposed):.0%}",
        f"{p.utilisation:.1%}",
        f"{p.copies:.1f}",
        link(p.break_even),
        link(p.ddp_needs),
    ]
