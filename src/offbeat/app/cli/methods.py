"""`offbeat methods`"""

import inspect
import re
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from offbeat import methods as named
from offbeat.app.cli import show
from offbeat.app.cli.refusal import Refused
from offbeat.plan.methods_table import PARAMETERS, WORKERS, Entry, Line, methods_table


def methods(
    name: Annotated[str | None, typer.Argument(help="Only this method, with its documentation.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """The methods, as the code has them, with the bytes and memory they take.

    Each row is the example in the method's documentation. Bytes per step (those of ddp are 1) and memory (in
    copies of the model, beside the model, its gradients and the optimizer, messages in the air included) are
    read off the method's parts, as `offbeat plan` does it, for a model of 124 M parameters in float32 on
    eight workers, after the warm-up. It takes a few seconds.

    Examples:

        offbeat methods

        offbeat methods diloco

        offbeat methods --json
    """
    if name is not None and name not in named.__all__:
        raise Refused(f"There is no method {name!r}: name one of {', '.join(named.__all__)}.")
    console = show.console()
    torch.set_num_threads(1)  # for small tensors more are slower
    with console.status("reading bytes and memory off the methods", spinner="dots"):
        entries = methods_table(named.__all__ if name is None else [name])
    if json:
        show.as_json([asdict(entry) for entry in entries])
        return
    columns = {
        "method": "fold",
        "when": "fold",
        "with whom": "fold",
        "what is sent": "fold",
        "how it is applied": "fold",
        "delay": "right",
        "bytes": "right",
        "copies": "right",
        "reference": "fold",
    }
    title = (
        f"Bytes per step, those of ddp being 1, and copies of the model kept, for {PARAMETERS / 1e6:.0f} M "
        f"parameters on {WORKERS} workers, after the warm-up"
    )
    show.print_table(console, title, columns, [_row(entry) for entry in entries], lines=True)
    if name is not None:
        console.print("\n" + (inspect.getdoc(getattr(named, name)) or ""), markup=False)


def _row(entry: Entry) -> list[str]:
    lines = _alike(entry.lines)
    fields = ("when", "among", "sent", "applied", "delay")
    return [
        entry.call,
        *["\n".join(line[field] for line in lines) for field in fields],
        f"{entry.share_of_ddp:.3g}",
        f"{entry.copies:.1f}".removesuffix(".0"),
        _cited(entry.reference),
    ]


def _cited(reference: str) -> str:
    """Authors and the paper's number."""
    number = re.search(r"arXiv \d+\.\d+", reference)
    return f"{reference.split(', ')[0]}, {number[0]}" if number else reference


def _alike(lines: tuple[Line, ...]) -> list[dict[str, str]]:
    """Parts that differ only in when they act, such as fragments, are told once."""
    counted = Counter((line.among, line.sent, line.applied, line.delay) for line in lines)
    told = []
    for line in lines:
        key = (line.among, line.sent, line.applied, line.delay)
        if count := counted.pop(key, 0):
            told.append(asdict(line) | {"when": line.when if count == 1 else f"{line.when}, {count} in turn"})
    return told
