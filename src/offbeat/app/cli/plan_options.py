"""The options of `offbeat plan`, panel by panel of its help."""

from pathlib import Path
from typing import Annotated, Any

import typer

CLUSTER, JOB, MEASURE, SHOWN = "The cluster", "The run", "Measuring", "What is shown"


def _cluster(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=CLUSTER)


def _job(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=JOB)


def _measure(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MEASURE)


def _shown(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SHOWN)


Methods = Annotated[list[str] | None, typer.Argument(help="Methods, as expressions.")]

Workers = Annotated[int | None, _cluster("How many.")]
Step = Annotated[str | None, _cluster("A worker's step: 250ms.")]
Jitter = Annotated[float, _cluster("Its deviation, as a share of it.")]
Tail = Annotated[float | None, _cluster("A Pareto tail instead; 3 is mild.")]
Straggler = Annotated[
    list[str] | None, _cluster("A late worker: rank=1,delay=300ms,every=4, or share=0.1,delay=300ms for any.")
]
Recorded = Annotated[Path | None, _cluster("Steps of a real run, as JSON.")]
Link = Annotated[str | None, _cluster("Each worker's link: 1gbit or 1gbit,5ms.")]
Level = Annotated[list[str] | None, _cluster("Groups that share an uplink, innermost first: 8:100gbit,5us.")]
Reduce = Annotated[str, _cluster("ring, tree, direct or ideal.")]
Failures = Annotated[float, _cluster("Failures per worker and hour.")]
Restart = Annotated[str, _cluster("Until it is back.")]
Checkpoint = Annotated[str, _cluster("From one checkpoint to the next.")]
File = Annotated[Path | None, _cluster("A Python file that defines a Cluster, a Job or both.")]

Steps = Annotated[int | None, _job("Steps of each worker.")]
Parameters = Annotated[str | None, _job("Trainable: 124M.")]
Dtype = Annotated[str, _job("Of the parameters.")]
Layers = Annotated[int, _job("Of the model.")]
Optimizer = Annotated[str, _job("sgd, momentum or adamw.")]
Rate = Annotated[float, _job("The (highest) rate.")]
Warmup = Annotated[int, _job("Steps of rising rate.")]
Cosine = Annotated[bool, _job("The rate falls as a cosine.")]

Measure = Annotated[bool, _measure("Time the real step, and under torchrun the link.", "--measure")]
Task = Annotated[str | None, _measure("The task whose step is timed.")]
Model = Annotated[str | None, _measure("Its size.")]
Data = Annotated[Path | None, _measure("Its data.")]
Batch = Annotated[int | None, _measure("Its batch size.")]
Script = Annotated[str | None, _measure("A training script, with arguments, instead.")]

Draw = Annotated[Path | None, _shown("Write time against bandwidth to this .svg.")]
Json = Annotated[bool, _shown("Print JSON instead of a table.", "--json")]
