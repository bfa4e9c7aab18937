"""`offbeat plan`"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import show
from offbeat.cli.described import cluster_of, compute_of, job_of, network_of
from offbeat.cli.measured import measured
from offbeat.cli.planned import as_dict, show_plan
from offbeat.cli.refusal import reading
from offbeat.plan import Cluster, Job, plan, read
from offbeat.plan.draw import picture
from offbeat.plan.units import parse_seconds
from offbeat.simulate import Failures

METHODS = (
    "ddp()",
    "local_sgd(every=8)",
    "cocod(every=8, delay=4)",
    "diloco(every=64)",
    "eager_diloco(every=64)",
)

_CLUSTER, _JOB, _MEASURE, _SHOWN = "The cluster", "The run", "Measuring", "What is shown"


def plan_command(
    context: typer.Context,
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
    with reading():
        job, where = _read(cluster, context)
    found = measured(measure, task, model, data, batch, script)
    with reading():
        where = where or cluster_of(
            found,
            workers=workers,
            compute=compute_of(found, step, jitter, tail, straggler, recorded),
            network=network_of(found, link, level or [], reduce),
            failures=Failures(failures, parse_seconds(restart), parse_seconds(checkpoint)),
        )
        job = job or job_of(found, steps, parameters, dtype, layers, optimizer, lr, warmup, cosine)
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


def _read(path: Path | None, context: typer.Context) -> tuple[Job | None, Cluster | None]:
    """What a file defines; options that say the same are refused."""
    if path is None:
        return None, None
    job, cluster = read(path, Job), read(path, Cluster)
    if job is None and cluster is None:
        raise ValueError(f"{path} defines neither a Cluster nor a Job.")
    panels = [*([_CLUSTER, _MEASURE] if cluster else []), *([_JOB] if job else [])]
    if given := [name for name in _given(context, panels) if name != "--cluster"]:
        kinds = " and a ".join(type(value).__name__ for value in (cluster, job) if value)
        raise ValueError(f"{path} defines a {kinds}: leave out {', '.join(given)}, or change the file.")
    return job, cluster


def _given(context: typer.Context, panels: list[str]) -> list[str]:
    """The options of these panels that stand on the command line."""
    return [
        option.opts[0]
        for option in context.command.params
        if getattr(option, "rich_help_panel", None) in panels
        and getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
    ]
