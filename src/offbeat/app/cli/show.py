"""Tables on the terminal, or the same as JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.app.cli import narrow
from offbeat.base.checks import replace_nonfinite

WIDE = 150  # columns, where there is no terminal to ask


def console() -> Console:
    """Standard output, at a width that holds a table where it is no terminal."""
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
    """`columns` are headings and how they stand: "right" for figures, "fold" for text that may be wrapped.

    As a table where its words fit into the width, else in one of the layouts for narrow terminals.
    """
    widths = narrow.widths(columns, rows, console.width)
    if widths is None:
        told = narrow.layout(title, columns, rows, console.width)
        console.print(told, markup=False, emoji=False, soft_wrap=True)
        return
    shown = Table(title=Text(title), title_justify="left", show_lines=lines)
    for (heading, stand), width in zip(columns.items(), widths, strict=True):
        shown.add_column(heading, justify="right" if stand == "right" else "left", width=width)
    for row in rows:
        cells = ["\n".join(narrow.wrapped(cell, width)) for cell, width in zip(row, widths, strict=True)]
        shown.add_row(*map(Text, cells))
    console.print(shown)


def some(count: int, noun: str) -> str:
    """So many of something: `1 worker`, `4 workers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def plain(row: Any) -> dict[str, Any]:
    """A dataclass for JSON, which has no infinities."""
    values: dict[str, Any] = replace_nonfinite(asdict(row))
    return values
