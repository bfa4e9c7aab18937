"""`offbeat methods`"""

import inspect
import re
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from offbeat import methods as named
from offbeat.app.cli import options, show
from offbeat.plan.methods_table import PARAMETERS, WORKERS, Entry, methods_table

COLUMNS = {
    "method": "fold", "when": "fold", "with whom": "fold", "what is sent": "fold",
    "how it is applied": "fold", "delay": "right", "bytes": "right", "copies": "right", "reference": "fold",
}  # fmt: skip
ALIKE = ("among", "sent", "applied", "delay")


def methods(
    name: Annotated[str | None, typer.Argument(help="Show only this method, with its documentation.")] = None,
    json: options.Json = False,
) -> None:
    """List the methods, with the bytes they send and the memory they take.

    Each row is the example in the method's documentation. Bytes per step are relative to ddp. Memory is in
    copies of the model and includes messages in the air, but not the model, its gradients and the optimizer.
    Both are computed as in `offbeat plan`, after the warm-up, for 124 M parameters in float32 on eight
    workers. This takes a few seconds.

    Examples:

        offbeat methods

        offbeat methods diloco

        offbeat methods --json
    """
    if name is not None and name not in named.__all__:
        raise options.Refused(f"There is no method {name!r}: name one of {', '.join(named.__all__)}.")
    console = show.console()
    torch.set_num_threads(1)  # small tensors are slower with more
    with console.status("computing bytes and memory", spinner="dots"):
        entries = methods_table(named.__all__ if name is None else [name])
    if json:
        show.print_json([asdict(entry) for entry in entries])
        return
    title = (
        f"Bytes per step relative to ddp, and copies of the model in memory, for {PARAMETERS / 1e6:.0f} M "
        f"parameters on {WORKERS} workers, after the warm-up"
    )
    show.print_table(console, title, COLUMNS, [_row(entry) for entry in entries], lines=True)
    if name is not None:
        console.print("\n" + (inspect.getdoc(getattr(named, name)) or ""), markup=False)


def _row(entry: Entry) -> list[str]:
    """The cells. Parts that differ only in when they act, such as fragments, become one line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in map(asdict, entry.lines):
        groups.setdefault(tuple(line[field] for field in ALIKE), []).append(line["when"])
    lines = [(f"{w[0]}, {len(w)} in turn" if len(w) > 1 else w[0], *alike) for alike, w in groups.items()]
    number = re.search(r"arXiv \d+\.\d+", entry.reference)
    reference = f"{entry.reference.split(', ')[0]}, {number[0]}" if number else entry.reference
    copies = f"{entry.copies:.1f}".removesuffix(".0")
    cells = map("\n".join, zip(*lines, strict=True))
    return [entry.call, *cells, f"{entry.share_of_ddp:.3g}", copies, reference]
