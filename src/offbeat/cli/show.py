"""Tables on the terminal, or the same as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Standard output, at a width that holds a table where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 150, highlight=False, soft_wrap=False)


def table(
    title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]], *, lines: bool = False
) -> Table:
    """`columns` are headings and how they stand: "left", "right", or "fold" for long text."""
    shown = Table(title=Text(title), title_justify="left", show_lines=lines)
    for heading, stand in columns.items():
        shown.add_column(
            heading,
            justify="right" if stand == "right" else "left",
            overflow="fold",
            no_wrap=stand == "right",
        )
    for row in rows:
        shown.add_row(*[Text(cell) for cell in row])
    return shown


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
