"""`offbeat plan`"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from offbeat.app.cli.options import STRAGGLER, check_names, complete_name
from offbeat.app.cli.waiting import waiting

CLUSTER, JOB, MEASURE = "Cluster", "Training run", "Measurement"  # panels of the help

_cluster: Any = partial(typer.Option, rich_help_panel=CLUSTER)
_job: Any = partial(typer.Option, rich_help_panel=JOB)
_measure: Any = partial(typer.Option, rich_help_panel=MEASURE)
_output: Any = partial(typer.Option, rich_help_panel="Output")


def plan(
    context: typer.Context,
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="Methods, such as 'diloco(every=100)'.", autocompletion=complete_name),
    ] = None,
    workers: Annotated[int | None, _cluster(help="Number of workers.")] = None,
    step: Annotated[str | None, _cluster(help="Time of a step: 250ms.")] = None,
    jitter: Annotated[float, _cluster(help="Standard deviation of a step, as a share of it.")] = 0.0,
    tail: Annotated[float | None, _cluster(help="Give steps a Pareto tail instead; 3 is mild.")] = None,
    straggler: Annotated[list[str] | None, _cluster(help=STRAGGLER)] = None,
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
    backward: Annotated[
        float, _job(help="Share of a step that is the backward pass, during which ddp sends; 0: after it.")
    ] = 2 / 3,
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
    quiet: Annotated[bool, _output("--quiet", help="Show no progress.")] = False,
    verbose: Annotated[bool, _output("--verbose", help="Also print what the plan assumes.")] = False,
    json: Annotated[bool, _output("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Predict the wall-clock time of methods on a cluster that you describe.

    Nothing is trained. Offbeat builds each method, works out when its rounds happen, and computes how long
    the workers compute and wait.

    Examples:

        offbeat plan --workers 8 --step 250ms --jitter 0.05 --parameters 124M --link 1gbit,5ms --steps 10000

        offbeat plan 'ddp()' 'diloco(every=100)' --cluster mine.py --draw plan.svg

        torchrun --nproc-per-node 4 -m offbeat plan --measure --task digits --steps 1000
    """
    given = SimpleNamespace(**locals())
    check_names(methods or [])
    with waiting("loading torch", quiet=quiet):
        from offbeat.app.commands.plan import run

    return run(given)
