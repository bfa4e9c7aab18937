"""The terminal: tables, whole at any width or as JSON, and a progress bar that follows the log of rank 0."""

import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from offbeat.app.runs.folder import log_path, origin_of, setting_of
from offbeat.base.checks import replace_nonfinite

WIDE = 150  # columns, if standard output is not a terminal
BAR_WIDE = 140  # columns of a run's progress, with a method of the usual length
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


def print_table(console: Console, title: str, columns: Columns, rows: Rows, *, lines: bool = False) -> None:
    """Print a table. A narrow terminal gets stacked lines, or lists if the figures do not fit on a line."""
    room = console.width
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
    """Break text at blanks or after an opening parenthesis, and indent all lines but the first."""
    lines: list[str] = []
    for given in text.splitlines():
        line = ""
        for piece in _pieces(given):
            if line.strip() and len(line) + len(piece.rstrip()) > room:
                lines.append(line.rstrip())
                line, piece = " " * indent, piece.lstrip()
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


def line_columns(width: int) -> list[ProgressColumn]:
    """The columns of a run's line. A narrow terminal gets two lines without a bar."""
    name, status = "{task.description}", "{task.fields[status]}"
    if width < BAR_WIDE:
        text = f"{name}\n  {{task.completed:.0f}}/{{task.total:.0f}}  {status}"
        return [TextColumn(text, markup=False, table_column=Column(no_wrap=False))]
    bar = BarColumn(bar_width=20)
    return [TextColumn(name, markup=False), bar, MofNCompleteColumn(), TextColumn(status, markup=False)]


@contextmanager
def follow_progress(folders: Sequence[Path]) -> Iterator[None]:
    """Follow the runs of these folders in a thread, if standard error is a terminal."""
    console = Console(stderr=True)
    progress = Progress(*line_columns(console.width), console=console, disable=not console.is_terminal)
    followers = [_Follower(folder, progress) for folder in folders]
    over = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = over.wait(0.2)
            for follower in followers:
                follower.poll()

    thread = threading.Thread(target=follow, daemon=True)
    with progress:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class _Follower:
    """Follows one run: the position in its log, and its last entries."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        setting = setting_of(folder)
        self.path, self.progress = log_path(folder, 0), progress
        self.workers, self.unit = setting.workers, origin_of(folder)["unit"]
        self.bar = progress.add_task(f"{setting.method} seed {setting.seed}", total=setting.steps, status="")
        self._read = self._sent = 0
        self._steps: deque[dict[str, Any]] = deque(maxlen=50)
        self._round: dict[str, Any] = {}

    def poll(self) -> None:
        if not self.path.exists():
            return
        if self.path.stat().st_size < self._read:  # a resumed run has shortened its log
            self._read = self._sent = 0
            self._steps.clear()
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for entry in map(json.loads, whole.splitlines()):
            if entry["kind"] == "steps":
                self._steps.append(entry)
            elif entry["kind"] == "round":
                self._round = entry
                self._sent += entry["sent"]
        if self._steps:
            self.progress.update(self.bar, completed=self._steps[-1]["step"], status=self._status())

    def _status(self) -> str:
        """Loss, speed, exposed share, bytes, period and drift over the last steps."""
        first, last = self._steps[0], self._steps[-1]
        total = sum(entry["seconds"] for entry in self._steps) or 1.0
        exposed = sum(entry["exposed"] for entry in self._steps) / total
        units, seconds = last["units"], total
        if len(self._steps) > 1:
            units, seconds = units - first["units"], seconds - first["seconds"]
        speed = self.workers * units / (seconds or 1.0)
        words = [f"loss {last['loss']:.3f}", f"{speed:,.0f} {self.unit}/s"]
        words += [f"exposed {exposed:.0%}", f"{self._sent / 1e6:.1f} MB"]
        words += [f"period {self._round['period']}"] if self._round else []
        words += [f"drift {drift:.2g}"] if (drift := self._round.get("drift")) is not None else []
        return "  ".join(words)
