"""`offbeat plan`"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console

from offbeat.app.cli import show
from offbeat.app.cli.plan_inputs import (
    CLUSTER,
    JOB,
    MEASURE,
    Found,
    cluster_of,
    job_of,
    measure_all,
    read_file,
)
from offbeat.app.cli.refusal import reading
from offbeat.base.units import as_bytes, as_rate, as_time
from offbeat.plan import Flat, Plan, Prediction, plan
from offbeat.plan.draw import chart, picture

HEADINGS = (
    "method", "rounds", "sent", "wall-clock", "±", "messages", "stragglers", "hidden", "busy", "copies",
    "ddp within 5 % from", "ddp as fast at",
)  # fmt: skip
_cluster: Any = partial(typer.Option, rich_help_panel=CLUSTER)
_job: Any = partial(typer.Option, rich_help_panel=JOB)
_measure: Any = partial(typer.Option, rich_help_panel=MEASURE)
_output: Any = partial(typer.Option, rich_help_panel="Output")

METHODS = (
    "ddp()",
    "local_sgd(every=8)",
    "cocod(every=8, delay=4)",
    "diloco(every=64)",
    "eager_diloco(every=64)",
)


def plan_command(
    context: typer.Context,
    methods: Annotated[list[str] | None, typer.Argument(help="Methods, such as 'diloco(every=100)'.")] = None,
    workers: Annotated[int | None, _cluster(help="Number of workers.")] = None,
    step: Annotated[str | None, _cluster(help="Time of a step: 250ms.")] = None,
    jitter: Annotated[float, _cluster(help="Standard deviation of a step, as a share of it.")] = 0.0,
    tail: Annotated[float | None, _cluster(help="Give steps a Pareto tail instead; 3 is mild.")] = None,
    straggler: Annotated[
        list[str] | None,
        _cluster(
            help="Make one worker late: rank=1,delay=300ms,every=4; or any worker: share=0.1,delay=300ms."
        ),
    ] = None,
    recorded: Annotated[Path | None, _cluster(help="JSON file with the step times of a real run.")] = None,
    link: Annotated[str | None, _cluster(help="Link of each worker: 1gbit or 1gbit,5ms.")] = None,
    level: Annotated[
        list[str] | None, _cluster(help="Groups that share an uplink, innermost first: 8:100gbit,5us.")
    ] = None,
    reduce: Annotated[str, _cluster(help="All-reduce algorithm: ring, tree, direct or ideal.")] = "ring",
    failures: Annotated[float, _cluster(help="Failures per worker and hour.")] = 0.0,
    restart: Annotated[str, _cluster(help="Time until a failed worker is back.")] = "60s",
    checkpoint: Annotated[str, _cluster(help="Time between checkpoints.")] = "0s",
    cluster: Annotated[
        Path | None, _cluster(help="Python file that defines a Cluster, a Job or both.")
    ] = None,
    steps: Annotated[int | None, _job(help="Steps of each worker.")] = None,
    parameters: Annotated[str | None, _job(help="Trainable parameters: 124M.")] = None,
    dtype: Annotated[str, _job(help="Data type of the parameters.")] = "float32",
    layers: Annotated[int, _job(help="Layers of the model.")] = 12,
    optimizer: Annotated[str, _job(help="sgd, momentum or adamw.")] = "adamw",
    lr: Annotated[float, _job(help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, _job(help="Warm-up steps of the learning rate.")] = 0,
    cosine: Annotated[bool, _job(help="Let the learning rate fall as a cosine.")] = True,
    measure: Annotated[
        bool, _measure("--measure", help="Time the real step and, under torchrun, the link.")
    ] = False,
    task: Annotated[str | None, _measure(help="Task to time.")] = None,
    model: Annotated[str | None, _measure(help="Model size of the task.")] = None,
    data: Annotated[Path | None, _measure(help="Data of the task.")] = None,
    batch: Annotated[int | None, _measure(help="Batch size of the task.")] = None,
    script: Annotated[
        str | None, _measure(help="Training script to time instead, with its arguments.")
    ] = None,
    draw: Annotated[Path | None, _output(help="Plot time against bandwidth to this .svg.")] = None,
    json: Annotated[bool, _output("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the wall-clock time of methods on a cluster that you describe.

    Nothing is trained. Offbeat builds each method, works out when its rounds happen, and computes how long
    the workers compute and wait.

    Examples:

        offbeat plan --workers 8 --step 250ms --jitter 0.05 --parameters 124M --link 1gbit,5ms --steps 10000

        offbeat plan 'ddp()' 'diloco(every=100)' --cluster mine.py --draw plan.svg

        torchrun --nproc-per-node 4 -m offbeat plan --measure --task digits --steps 1000
    """
    given = SimpleNamespace(**locals())
    with reading():
        job, where = read_file(cluster, context)
        found = measure_all(given)
        where = where or cluster_of(given, found)
        job = job or job_of(given, found)
    if found.comm is None or found.comm.rank == 0:
        console = show.console()
        with reading(), console.status("planning", spinner="dots"):
            result = plan(methods or METHODS, job, where)
        if draw is not None:
            with reading():
                draw.write_text(picture(result))
        if json:
            show.print_json(_as_dict(result, found))
        else:
            _print(console, result, found, draw)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _as_dict(plan: Plan, found: Found) -> dict[str, Any]:
    """The plan for JSON."""
    link = [{"bytes": b, "seconds": s} for b, s in found.points]
    return {
        "why": plan.why,
        "job": {**asdict(replace(plan.job, rate=Flat(0.0))), "rate": repr(plan.job.rate)},
        "cluster": repr(plan.cluster),
        "measured": None if found.step is None else {**asdict(found.step), "link": link},
        "predictions": [prediction.as_dict() for prediction in plan.predictions],
    }


def _print(console: Console, plan: Plan, found: Found, draw: Path | None) -> None:
    """Print the table, the reason and the chart."""
    if found.compute is not None and found.step is not None:
        times = sorted(time for row in found.compute.rows for time in row)
        text = f"Measured: the median step takes {as_time(times[len(times) // 2])}"
        if found.network is not None:
            text += f", the link carries {as_rate(min(found.network.links))}"
        console.print(text + f"; {show.count(found.step.parameters, 'parameter')}.", markup=False)
    columns = {heading: "fold" if heading == "method" else "right" for heading in HEADINGS}
    title = f"{show.count(plan.job.steps, 'step')} on {show.count(plan.cluster.workers, 'worker')}"
    show.print_table(console, title, columns, [_row(p) for p in plan.predictions])
    for prediction in plan.predictions:
        for note in prediction.notes:
            console.print(f"{prediction.method}: {note}.", markup=False)
    console.print("\n" + plan.why + "\n", markup=False)
    console.print("Wall-clock time against link bandwidth, both logarithmic:", markup=False)
    console.print(chart(plan, width=console.width), markup=False, soft_wrap=True)
    if draw is not None:
        console.print(f"\nPlot: {draw}", markup=False)


def _row(p: Prediction) -> list[str]:
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
        *("-" if bandwidth is None else as_rate(bandwidth) for bandwidth in (p.break_even, p.ddp_needs)),
    ]
