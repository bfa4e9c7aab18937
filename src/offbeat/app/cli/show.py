"""Tables on the terminal, or the same as JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.app.cli import narrow
from offbeat.base.checks import replace_nonfinite

WIDE = 150  # columns, if standard output is not a terminal


def console() -> Console:
    """Standard output, wide enough for a table if it is not a terminal."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDE, highlight=False, soft_wrap=False)


def print_table(
    console: Console,
    title: str,
    columns: Mapping[str, str],
    rows: Sequence[Sequence[str]],
    *,
    lines: bool = False,
) -> None:
    """Print a table, or a list if the terminal is too narrow for a table.

    `columns` maps each heading to its kind: "right" for figures, "fold" for text that may be wrapped.
    """
    widths = narrow.column_widths(columns, rows, console.width)
    if widths is None:
        text = narrow.lay_out(title, columns, rows, console.width)
        console.print(text, markup=False, emoji=False, soft_wrap=True)
        return
    table = Table(title=Text(title), title_justify="left", show_lines=lines)
    for (heading, kind), width in zip(columns.items(), widths, strict=True):
        table.add_column(heading, justify="right" if kind == "right" else "left", width=width)
    for row in rows:
        cells = ["\n".join(narrow.wrap(cell, width)) for cell, width in zip(row, widths, strict=True)]
        table.add_row(*map(Text, cells))
    console.print(table)


def count(number: int, noun: str) -> str:
    """A number of things: `1 worker`, `4 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    print(json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, allow_nan=False))
