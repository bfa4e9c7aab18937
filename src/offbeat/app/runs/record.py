"""A rank's log: one JSON object per line, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Record:
    """Appends lines; each is written at once, so that a killed process leaves all but perhaps its last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def entries(path: Path) -> Iterator[Entry]:
    """The lines of a log; one that is torn, as a kill may leave it, and all after it are not there."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                return


def cut(path: Path, *, after: int) -> None:
    """Forget what was logged after a step: a resumed run writes it anew."""
    kept = [entry for entry in entries(path) if entry["step"] <= after and entry["kind"] != "end"]
    beside = path.with_name(f".{path.name}")
    beside.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    beside.replace(path)


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"
