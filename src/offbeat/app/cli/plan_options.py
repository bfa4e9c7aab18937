"""The options of `offbeat plan`, in the order and panels of its help."""

from pathlib import Path
from typing import Annotated, Any

import typer

CLUSTER, JOB, MEASURE, OUTPUT = "Cluster", "Training run", "Measurement", "Output"


def _option(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


Methods = Annotated[list[str] | None, typer.Argument(help="Methods, such as 'diloco(every=100)'.")]

Workers = Annotated[int | None, _option(CLUSTER, "Number of workers.")]
Step = Annotated[str | None, _option(CLUSTER, "Time of a step: 250ms.")]
Jitter = Annotated[float, _option(CLUSTER, "Standard deviation of a step, as a share of it.")]
Tail = Annotated[float | None, _option(CLUSTER, "Give steps a Pareto tail instead; 3 is mild.")]
Straggler = Annotated[
    list[str] | None,
    _option(
        CLUSTER, "Make one worker late: rank=1,delay=300ms,every=4; or any worker: share=0.1,delay=300ms."
    ),
]
Recorded = Annotated[Path | None, _option(CLUSTER, "JSON file with the step times of a real run.")]
Link = Annotated[str | None, _option(CLUSTER, "Link of each worker: 1gbit or 1gbit,5ms.")]
Level = Annotated[
    list[str] | None, _option(CLUSTER, "Groups that share an uplink, innermost first: 8:100gbit,5us.")
]
Reduce = Annotated[str, _option(CLUSTER, "All-reduce algorithm: ring, tree, direct or ideal.")]
Failures = Annotated[float, _option(CLUSTER, "Failures per worker and hour.")]
Restart = Annotated[str, _option(CLUSTER, "Time until a failed worker is back.")]
Checkpoint = Annotated[str, _option(CLUSTER, "Time between checkpoints.")]
File = Annotated[Path | None, _option(CLUSTER, "Python file that defines a Cluster, a Job or both.")]

Steps = Annotated[int | None, _option(JOB, "Steps of each worker.")]
Parameters = Annotated[str | None, _option(JOB, "Trainable parameters: 124M.")]
Dtype = Annotated[str, _option(JOB, "Data type of the parameters.")]
Layers = Annotated[int, _option(JOB, "Layers of the model.")]
Optimizer = Annotated[str, _option(JOB, "sgd, momentum or adamw.")]
Rate = Annotated[float, _option(JOB, "Peak learning rate.")]
Warmup = Annotated[int, _option(JOB, "Warm-up steps of the learning rate.")]
Cosine = Annotated[bool, _option(JOB, "Let the learning rate fall as a cosine.")]

Measure = Annotated[bool, _option(MEASURE, "Time the real step and, under torchrun, the link.", "--measure")]
Task = Annotated[str | None, _option(MEASURE, "Task to time.")]
Model = Annotated[str | None, _option(MEASURE, "Model size of the task.")]
Data = Annotated[Path | None, _option(MEASURE, "Data of the task.")]
Batch = Annotated[int | None, _option(MEASURE, "Batch size of the task.")]
Script = Annotated[str | None, _option(MEASURE, "Training script to time instead, with its arguments.")]

Draw = Annotated[Path | None, _option(OUTPUT, "Plot time against bandwidth to this .svg.")]
Json = Annotated[bool, _option(OUTPUT, "Print JSON instead of a table.", "--json")]
