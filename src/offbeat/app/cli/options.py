"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Task = Annotated[
    str, typer.Option(help="digits, bytes, images, or a Python file whose function `task` returns a Task.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="Size of the model: tiny, small, medium or large.")
]
Data = Annotated[
    str | None, typer.Option(help="A text for bytes; a folder or zip of train/CLASS/*.jpg for images.")
]
Workers = Annotated[int, typer.Option(help="How many workers share the model.")]
Steps = Annotated[int, typer.Option(help="Local steps of each worker.")]
Batch = Annotated[int | None, typer.Option(help="Samples per worker and step; the task's own by default.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate; the task's own by default.")]
Optimizer = Annotated[str | None, typer.Option(help="adamw or sgd; the task's own by default.")]
Evaluations = Annotated[int, typer.Option(help="How often the held-out loss is taken.")]
Link = Annotated[
    str | None, typer.Option(help="Emulate a link of this rate and latency, such as 100mbit or 100mbit,20ms.")
]
Straggler = Annotated[
    list[str] | None,
    typer.Option(help="A late worker: rank=1,delay=300ms,every=4, or share=0.1,delay=300ms for any."),
]
Netns = Annotated[
    bool, typer.Option("--netns", help="Workers in network namespaces on really shaped links (Linux, root).")
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Workers in one process, in virtual time: exactly repeatable.")
]
Compute = Annotated[str, typer.Option(help="With --simulate: what a step takes, such as 20ms.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Out = Annotated[Path | None, typer.Option(help="The folder for logs and the page; runs/... by default.")]
