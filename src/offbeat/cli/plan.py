"""`offbeat plan`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli import show
from offbeat.cli.measured import Found, measured
from offbeat.cli.planned import as_dict, show_plan
from offbeat.cli.refusal import reading
from offbeat.plan import Cluster, Cosine, Flat, Job, plan, read
from offbeat.plan.draw import picture
from offbeat.plan.units import parse_count, parse_level, parse_link, parse_seconds
from offbeat.simulate import Compute, Constant, Failures, HeavyTailed, Jittered, Network, Recorded, Stragglers

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
    found = measured(measure, task, model, data, batch, script)
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
        show.as_json(as_dict(made, found))
    else:
        show_plan(console, made, found, draw)
    found.leave()


def _files(path: Path | None) -> tuple[Job | None, Cluster | None]:
    if path is None:
        return None, None
    job, cluster = read(path, Job), read(path, Cluster)
    if job is None and cluster is None:
        raise ValueError(f"{path} defines neither a Cluster nor a Job.")
    return job, cluster


def _compute(
    found: Found,
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


def _network(found: Found, link: str | None, levels: list[str], reduce: Any) -> Network | None:
    if link is None:
        return found.network if not levels else None
    bandwidth, latency = parse_link(link)
    return Network(latency, bandwidth, reduce, tuple(map(parse_level, levels)))


def _cluster(
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
    return Cluster(workers, compute, network, failures)


def _job(
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
    rate = Cosine(lr, steps, warmup) if cosine and steps > warmup else Flat(lr)
    return Job(steps, parse_count(parameters), dtype, rate, optimizer, layers)
