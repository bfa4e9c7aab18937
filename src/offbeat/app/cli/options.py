"""Options that several commands share, and bad input: one sentence, and exit code 2."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from offbeat.base.errors import BadArgument, show, suggest

Task = Annotated[
    str, typer.Option(help="digits, bytes, images, or a Python file whose function `task` returns a Task.")
]
Model = Annotated[str | None, typer.Option("--model", help="Model size: tiny, small, medium or large.")]
Data = Annotated[
    str | None, typer.Option(help="A text file for bytes; a folder or zip of train/CLASS/*.jpg for images.")
]
Workers = Annotated[int, typer.Option(help="Number of workers.")]
Steps = Annotated[int, typer.Option(help="Local steps of each worker.")]
Batch = Annotated[int | None, typer.Option(help="Samples per worker and step; the task has a default.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate; the task has a default.")]
ToLoss = Annotated[
    float | None, typer.Option(help="Show the seconds and bytes until each method first reached this loss.")
]
Optimizer = Annotated[str | None, typer.Option(help="adamw or sgd; the task has a default.")]
Seed = Annotated[int, typer.Option(help="Seeds the initial weights and the order of the data.")]
Evaluations = Annotated[int, typer.Option(help="How many times to measure the held-out loss.")]
Link = Annotated[
    str | None,
    typer.Option(help="Emulate a link with this rate and latency: 100mbit,20ms."),
]
STRAGGLER = "Make one worker late: rank=1,delay=300ms,every=4; or any worker: share=0.1,delay=300ms."
Straggler = Annotated[list[str] | None, typer.Option(help=STRAGGLER)]
Netns = Annotated[
    bool,
    typer.Option("--netns", help="Run workers in network namespaces on real shaped links (Linux, root)."),
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Simulate the workers in one process, in virtual time; repeatable.")
]
Compute = Annotated[str | None, typer.Option(help="With --simulate: the time of one step, 20ms by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print each evaluation when it is made.")]
Token = Annotated[
    Path | None, typer.Option(help="A file with a secret: workers with another one cannot join.")
]
Out = Annotated[Path | None, typer.Option(help="Folder for logs and report.html; runs/... by default.")]


TORCH_DDP_ONLY = "torch_ddp is torch's own DDP, which only `train` and `compare` run: use ddp."


def list_names() -> list[str]:
    """The names of all methods."""
    from offbeat.app.commands.catalogue import read_catalogue

    return sorted(name for family in read_catalogue()["families"].values() for name in family)


def complete_name(incomplete: str) -> list[str]:
    """The names of methods that begin like this."""
    return [name for name in list_names() if name.startswith(incomplete)]


def name_of(method: str) -> str:
    """The name of a method that is written as a call, or as the name alone."""
    return method.partition("(")[0].strip()


def check_names(methods: Sequence[str], *, torch_ddp: bool = False) -> None:
    """Refuse a misspelled method before torch is loaded, which takes seconds."""
    names = [*list_names(), "torch_ddp"]
    for name in map(name_of, methods):
        if name.isidentifier() and name not in names:
            raise Refused(f"There is no method {name!r}{suggest(name, names)}; `offbeat methods` lists them.")
        if name == "torch_ddp" and not torch_ddp:
            raise Refused(TORCH_DDP_ONLY)


def check_once(methods: Sequence[str]) -> None:
    """Refuse a method that is given twice: a comparison shows it once."""
    calls = [method.strip() if "(" in method else f"{method.strip()}()" for method in methods]
    if twice := next((call for call in calls if calls.count(call) > 1), None):
        raise Refused(f"{twice} is given twice: leave one out.")


# Arguments with other options.
RENAMED = {"size": "model", "hosts": "workers", "rate": "link", "per_hour": "failures"}


class Refused(Exception):
    """The user's input cannot be used. The message is one sentence. All ranks say it, or one `alone`."""

    def __init__(self, sentence: str, *, alone: bool = False) -> None:
        super().__init__(sentence)
        self.alone = alone


def plain(text: str) -> str:
    """The text with control characters written out, so that none reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def check_loss(to_loss: float | None) -> None:
    if to_loss is not None and not math.isfinite(to_loss):
        raise BadArgument("to_loss", to_loss, "must be a finite number.")


@contextmanager
def reading(option: str = "", value: object = None) -> Iterator[None]:
    """Turn errors about the user's input into `Refused`, which names the option and its value if given."""
    typed = f"{option} {show(value)}"
    try:
        yield
    except BadArgument as error:
        name = RENAMED.get(error.name, error.name).replace("_", "-")
        raise Refused(f"{typed if option else f'--{name} {show(error.value)}'}: {error.reason}") from error
    except (ValueError, TypeError) as error:
        raise Refused(f"{typed}: {error}" if option else str(error)) from error
    except OSError as error:
        reason = error.strerror or str(error)
        if option:
            kinds = {FileNotFoundError: "there is no such file", IsADirectoryError: "this is a directory"}
            reason = kinds.get(type(error), reason.lower())
            raise Refused(f"{typed}: {reason}.") from error
        where = f": {error.filename!r}" if error.filename else ""
        raise Refused(f"{reason}{where}.") from error


@contextmanager
def about(method: str) -> Iterator[None]:
    """Put the method, one of several, in front of a sentence that does not name it."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, BadArgument) or name_of(method) in str(error):
            raise
        raise ValueError(f"{method}: {error}") from error
