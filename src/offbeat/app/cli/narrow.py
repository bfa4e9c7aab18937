"""Layouts for narrow terminals. No word is cut, whatever the width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

EDGES = 3  # characters that borders and blanks add to a column; one more closes the table
GAP = "  "


def column_widths(columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The width of each column, or None if the table does not fit. Text columns share the spare room."""
    cells = [[heading, *[row[i] for row in rows]] for i, heading in enumerate(columns)]
    kinds = [(column, columns[column[0]] == "right") for column in cells]
    wanted = [max(_length(cell) for cell in column) for column in cells]
    widths = [max(map(_length if figure else _longest, column[1:]), default=0) for column, figure in kinds]
    widths = [max(least, _longest(column[0])) for least, column in zip(widths, cells, strict=True)]
    widths[0] = max(widths[0], *[len(word) for cell in cells[0] for word in cell.split()])  # whole names
    left = room - EDGES * len(widths) - 1 - sum(widths)
    if left < 0:
        return None
    while left and (short := max(w - f for w, f in zip(wanted, widths, strict=True))):
        # The column that lacks most grows first, so that none becomes long and thin.
        widths[next(i for i, (w, f) in enumerate(zip(wanted, widths, strict=True)) if w - f == short)] += 1
        left -= 1
    return widths


def lay_out(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> str:
    """The rows as stacked lines, or as lists if the figures do not fit side by side."""
    lines = _stack(columns, rows, room) or _list(columns, rows, room)
    return "\n".join([*wrap(title, room), "", *lines])


def _stack(columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> list[str] | None:
    """The first column on a line of its own, with the figures below it."""
    name, *headings = columns
    if any(columns[heading] != "right" for heading in headings):
        return None
    cells = [[row[i + 1] for row in rows] for i in range(len(headings))]
    sizes = [max(map(len, [*heading.split(), *cells[i]])) for i, heading in enumerate(headings)]
    if len(GAP) * len(sizes) + sum(sizes) > room:
        return None

    def line(texts: Sequence[str]) -> str:
        return "".join(GAP + text.rjust(size) for text, size in zip(texts, sizes, strict=True)).rstrip()

    words = [wrap(heading, size) for heading, size in zip(headings, sizes, strict=True)]
    deep = max(map(len, words))
    heads = [line([([""] * (deep - len(w)) + w)[level] for w in words]) for level in range(deep)]
    lines = [name, *heads, "─" * (len(GAP) * len(sizes) + sum(sizes))]
    for i, row in enumerate(rows):
        lines += [*wrap(row[0], room, indent=2), line([column[i] for column in cells])]
    return lines


def _list(columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> list[str]:
    """One line per text, and all figures on one line."""
    _, *headings = columns
    lines: list[str] = []
    for row in rows:
        lines += wrap(row[0], room, indent=2)
        given = [(heading, cell) for heading, cell in zip(headings, row[1:], strict=True) if cell.strip()]
        for heading, cell in given:
            if columns[heading] != "right":
                lines += wrap(f"{GAP}{heading}: {_join(cell)}", room, indent=4)
        # A line never breaks between a heading and its figure.
        figures = [f"{h} {_join(c)}".replace(" ", "\0") for h, c in given if columns[h] == "right"]
        if figures:
            together = wrap(GAP + (GAP + " ").join(figures), room, indent=2)
            lines += [line.replace("\0", " ") for line in together]
        lines.append("")
    return lines[:-1]


def _join(cell: str) -> str:
    """The lines of a cell on one line; equal lines are given once."""
    lines = cell.splitlines()
    return lines[0] if len(set(lines)) == 1 else "; ".join(lines)


def wrap(text: str, room: int, *, indent: int = 0) -> list[str]:
    """Break text at blanks or after an opening parenthesis, and indent all lines but the first."""
    lines: list[str] = []
    for given in text.splitlines():
        line = ""
        for piece in _pieces(given):
            if line.strip() and len(line) + len(piece.rstrip()) > room:
                lines.append(line.rstrip())
                line = " " * indent
                piece = piece.lstrip()
            line += piece
        lines.append(line.rstrip())
    return lines or [""]


def _pieces(line: str) -> list[str]:
    """The unbreakable pieces of a line, each with the blanks before it."""
    return re.findall(r"\s*[^\s(]*\(+|\s*[^\s(]+", line)


def _length(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _longest(cell: str) -> int:
    return max((len(piece.strip()) for line in cell.splitlines() for piece in _pieces(line)), default=0)
