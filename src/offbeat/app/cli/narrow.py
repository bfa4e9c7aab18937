"""Tables where there is little room: no word is cut, whatever the width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

EDGES = 3  # columns that a table's lines and blanks take for each of its own, and one more at the end
GAP = "  "


def widths(columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Of each column: figures and words stay whole, and text gets what is left; None if that is too much."""
    cells = [[heading, *[row[i] for row in rows]] for i, heading in enumerate(columns)]
    kinds = [(column, columns[column[0]] == "right") for column in cells]
    wanted = [max(_length(cell) for cell in column) for column in cells]
    found = [max(map(_length if figure else _longest, column[1:]), default=0) for column, figure in kinds]
    found = [max(least, _longest(column[0])) for least, column in zip(found, cells, strict=True)]
    found[0] = max(found[0], *[len(word) for cell in cells[0] for word in cell.split()])  # names stay whole
    left = room - EDGES * len(found) - 1 - sum(found)
    if left < 0:
        return None
    while left and (short := max(w - f for w, f in zip(wanted, found, strict=True))):
        # What has most to gain grows first, so that no text becomes a long thin column.
        found[next(i for i, (w, f) in enumerate(zip(wanted, found, strict=True)) if w - f == short)] += 1
        left -= 1
    return found


def layout(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> str:
    """Each row's name above its figures; one below the other where these do not fit side by side either."""
    found = _stacked(columns, rows, room) or _listed(columns, rows, room)
    return "\n".join([*wrapped(title, room), "", *found])


def _stacked(columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> list[str] | None:
    """The first column on a line of its own, the others below it under their headings."""
    name, *headings = columns
    if any(columns[heading] != "right" for heading in headings):
        return None
    cells = [[row[i + 1] for row in rows] for i in range(len(headings))]
    sizes = [max(map(len, [*heading.split(), *cells[i]])) for i, heading in enumerate(headings)]
    if len(GAP) * len(sizes) + sum(sizes) > room:
        return None

    def line(texts: Sequence[str]) -> str:
        return "".join(GAP + text.rjust(size) for text, size in zip(texts, sizes, strict=True)).rstrip()

    words = [wrapped(heading, size) for heading, size in zip(headings, sizes, strict=True)]
    deep = max(map(len, words))
    heads = [line([([""] * (deep - len(w)) + w)[level] for w in words]) for level in range(deep)]
    found = [name, *heads, "─" * (len(GAP) * len(sizes) + sum(sizes))]
    for i, row in enumerate(rows):
        found += [*wrapped(row[0], room, indent=2), line([column[i] for column in cells])]
    return found


def _listed(columns: Mapping[str, str], rows: Sequence[Sequence[str]], room: int) -> list[str]:
    """A line for each text, and the figures one after the other."""
    _, *headings = columns
    found: list[str] = []
    for row in rows:
        found += wrapped(row[0], room, indent=2)
        told = [(heading, cell) for heading, cell in zip(headings, row[1:], strict=True) if cell.strip()]
        for heading, cell in told:
            if columns[heading] != "right":
                found += wrapped(f"{GAP}{heading}: {_once(cell)}", room, indent=4)
        # Blanks inside a figure and its name do not part them.
        figures = [f"{h} {_once(c)}".replace(" ", "\0") for h, c in told if columns[h] == "right"]
        if figures:
            lines = wrapped(GAP + (GAP + " ").join(figures), room, indent=2)
            found += [line.replace("\0", " ") for line in lines]
        found.append("")
    return found[:-1]


def _once(cell: str) -> str:
    """On one line; what all lines say is said once."""
    lines = cell.splitlines()
    return lines[0] if len(set(lines)) == 1 else "; ".join(lines)


def wrapped(text: str, room: int, *, indent: int = 0) -> list[str]:
    """Lines of text, broken at blanks or behind a parenthesis that opens; later ones are indented."""
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
    """What is never broken: words up to a parenthesis that opens, with the blanks before them."""
    return re.findall(r"\s*[^\s(]*\(+|\s*[^\s(]+", line)


def _length(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _longest(cell: str) -> int:
    return max((len(piece.strip()) for line in cell.splitlines() for piece in _pieces(line)), default=0)
