"""Tables on the terminal, or the same as JSON."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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


def plain(row: Any) -> dict[str, Any]:
    """A dataclass for JSON, which has no infinities."""
    values: dict[str, Any] = finite(asdict(row))
    return values


def finite(value: Any) -> Any:
    """The same, with null for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
