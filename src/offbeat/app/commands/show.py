"""The terminal: tables, whole at any width or as JSON, and text without control characters."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.app.cli.options import plain
from offbeat.base.checks import replace_nonfinite

WIDE = 150  # columns, if standard output is not a terminal
EDGES = 3  # characters that borders and blanks add to a column; one more closes the table
GAP = "  "

Columns = Mapping[str, str]  # each heading with its kind: "right" for figures, "fold" for text to wrap
Rows = Sequence[Sequence[str]]


def console() -> Console:
    """Standard output, wide enough for a table if it is not a terminal."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDE, highlight=False, soft_wrap=False)


def count(number: int, noun: str) -> str:
    """A number of things: `1 worker`, `4 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    print(json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, allow_nan=False))


def say(console: Console, text: str) -> None:
    """Print a line as it is, without markup and control characters. A terminal breaks it if it is long."""
    console.print(plain(text), soft_wrap=True, markup=False, emoji=False)


def print_table(console: Console, title: str, columns: Columns, rows: Rows, *, lines: bool = False) -> None:
    """Print a table. A narrow terminal gets stacked lines, or lists if the figures do not fit on a line."""
    room, title = console.width, plain(title)
    columns = {plain(heading): kind for heading, kind in columns.items()}
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = _column_widths(columns, rows, room)
    if widths is None:
        body = _stack(columns, rows, room) or _list(columns, rows, room)
        text = "\n".join([*wrap(title, room), "", *body])
        console.print(text, markup=False, emoji=False, soft_wrap=True)
        return
    table = Table(title=Text(title), title_justify="left", show_lines=lines)
    for (heading, kind), width in zip(columns.items(), widths, strict=True):
        table.add_column(heading, justify="right" if kind == "right" else "left", width=width)
    for row in rows:
        cells = ["\n".join(wrap(cell, width)) for cell, width in zip(row, widths, strict=True)]
        table.add_row(*map(Text, cells))
    console.print(table)


def _column_widths(columns: Columns, rows: Rows, room: int) -> list[int] | None:
    """The width of each column, or None if the table does not fit. Text columns share the spare room."""
    widths, wanted = [], []
    for i, (heading, kind) in enumerate(columns.items()):
        cells = [row[i] for row in rows]
        widths.append(max([_longest(heading), *map(_length if kind == "right" else _longest, cells)]))
        wanted.append(max(map(_length, [heading, *cells])))
    names = [*columns][:1] + [row[0] for row in rows]
    widths[0] = max(widths[0], *[len(word) for name in names for word in name.split()])  # never broken
    spare = room - EDGES * len(widths) - 1 - sum(widths)
    for _ in range(spare):
        # The column that lacks most grows first, so that none becomes long and thin.
        lacking = max(range(len(widths)), key=lambda i: wanted[i] - widths[i])
        widths[lacking] += wanted[lacking] > widths[lacking]
    return None if spare < 0 else widths


def _stack(columns: Columns, rows: Rows, room: int) -> list[str] | None:
    """The first column on a line of its own, with the figures below it; None if they do not fit."""
    name, *headings = columns
    sizes = [max(map(len, [*h.split(), *[row[i] for row in rows]])) for i, h in enumerate(headings, 1)]
    width = len(GAP) * len(sizes) + sum(sizes)
    if width > room or any(columns[heading] != "right" for heading in headings):
        return None

    def line(texts: Sequence[str]) -> str:
        return "".join(GAP + text.rjust(size) for text, size in zip(texts, sizes, strict=True)).rstrip()

    words = [wrap(heading, size) for heading, size in zip(headings, sizes, strict=True)]
    deep = max(map(len, words))
    heads = [line([([""] * (deep - len(w)) + w)[level] for w in words]) for level in range(deep)]
    lines = [name, *heads, "─" * width]
    for row in rows:
        lines += [*wrap(row[0], room, indent=2), line(row[1:])]
    return lines


def _list(columns: Columns, rows: Rows, room: int) -> list[str]:
    """One line per text, and all figures on one line."""
    lines: list[str] = []
    for row in rows:
        lines += wrap(row[0], room, indent=2)
        figures = []
        for (heading, kind), cell in list(zip(columns.items(), row, strict=True))[1:]:
            parts = cell.splitlines() if cell.strip() else []
            text = parts[0] if len(set(parts)) == 1 else "; ".join(parts)  # equal lines are given once
            if parts and kind == "right":
                figures.append(f"{heading} {text}".replace(" ", "\0"))  # never broken
            elif parts:
                lines += wrap(f"{GAP}{heading}: {text}", room, indent=4)
        if figures:
            together = wrap(GAP + (GAP + " ").join(figures), room, indent=2)
            lines += [line.replace("\0", " ") for line in together]
        lines.append("")
    return lines[:-1]


def wrap(text: str, room: int, *, indent: int = 0) -> list[str]:
    """Break text at blanks, and longer words after a parenthesis. Indent all lines but the first."""
    lines: list[str] = []
    for given in text.splitlines():
        line = ""
        for piece in _pieces(given, room - indent):
            if line.strip() and len(line) + len(piece.rstrip()) > room:
                lines.append(line.rstrip())
                line, piece = " " * indent, piece.lstrip()
            line += piece
        lines.append(line.rstrip())
    return lines or [""]


def _pieces(line: str, room: int = 0) -> list[str]:
    """The pieces of a line that stay whole, each with the blanks before it. Words that do not fit may be
    broken after an opening parenthesis."""
    words = re.findall(r"\s*\S+", line)
    broken = [
        re.findall(r"\s*[^\s(]*\(+|\s*[^\s(]+", word) if len(word.strip()) > room else [word]
        for word in words
    ]
    return [piece for pieces in broken for piece in pieces]


def _length(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _longest(cell: str) -> int:
    return max((len(piece.strip()) for line in cell.splitlines() for piece in _pieces(line)), default=0)
