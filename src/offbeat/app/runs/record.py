"""The log of a rank: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
LINES = 2000  # of steps in a log, at most; in a longer run, each covers several steps


class Record:
    """Appends lines. Each is written at once, so a killed process loses at most its last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


class Tally:
    """Writes one line for every few steps."""

    def __init__(self, record: Record, *, steps: int, units: int = 0) -> None:
        self.record, self.units = record, units
        self._every = -(-steps // LINES)
        self._count, self._seconds, self._exposed, self._loss = 0, 0.0, 0.0, 0.0

    def add(self, step: int, *, start: float, end: float, exposed: float, loss: float, units: int) -> None:
        self._count += 1
        self._seconds += end - start
        self._exposed += exposed
        self._loss += loss
        self.units += units
        if self._count == self._every:
            self.write(step, end)

    def write(self, step: int, end: float) -> None:
        """Write the steps since the last line."""
        if not self._count:
            return
        mean = {"seconds": self._seconds, "exposed": self._exposed, "loss": self._loss / self._count}
        self.record.write("steps", step=step, t=end, **mean, units=self.units)
        self._count, self._seconds, self._exposed, self._loss = 0, 0.0, 0.0, 0.0


def entries(path: Path) -> Iterator[Entry]:
    """The lines of a log, up to the first one that a kill has torn."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if "waited" in entry:  # older logs
                entry["exposed"] = entry.pop("waited")
            yield entry


def cut(path: Path, *, after: int) -> None:
    """Drop the lines after a step; the resumed run writes them again."""
    kept = [entry for entry in entries(path) if entry["step"] <= after and entry["kind"] != "end"]
    beside = path.with_name(f".{path.name}")
    beside.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    beside.replace(path)


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"
