"""The table of `offbeat methods --verbose`: the parts of each method, its bytes and its memory."""

import re
from dataclasses import asdict

import torch
from rich.console import Console

from offbeat import methods as named
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import show
from offbeat.plan.methods_table import PARAMETERS, WORKERS, Entry, methods_table

COLUMNS = {
    "method": "fold", "when": "fold", "with whom": "fold", "what is sent": "fold",
    "how it is applied": "fold", "delay": "right", "bytes": "right", "copies": "right", "reference": "fold",
}  # fmt: skip
ALIKE = ("among", "sent", "applied", "delay")


def show_parts(console: Console, name: str | None, *, as_json: bool) -> None:
    """Print the table of all methods, or of one, or print it as JSON."""
    torch.set_num_threads(1)  # small tensors are slower with more
    with waiting("computing bytes and memory"):
        entries = methods_table(named.__all__ if name is None else [name])
    if as_json:
        show.print_json([asdict(entry) for entry in entries])
        return
    title = (
        f"Bytes per step relative to ddp, and copies of the model in memory, for {PARAMETERS / 1e6:.0f} M "
        f"parameters on {WORKERS} workers, after the warm-up"
    )
    show.print_table(console, title, COLUMNS, [_row(entry) for entry in entries], lines=True)


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
