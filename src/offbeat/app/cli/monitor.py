"""A progress bar that follows the log of rank 0."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

from offbeat.app.runs.folder import origin_of, setting_of
from offbeat.app.runs.record import log_path

WIDE = 140  # columns of a run's line, with a method of the usual length


def line_columns(width: int) -> list[ProgressColumn]:
    """The columns of a run's line. A narrow terminal gets two lines without a bar."""
    if width < WIDE:
        text = "{task.description}\n  {task.completed:.0f}/{task.total:.0f}  {task.fields[status]}"
        return [TextColumn(text, markup=False, table_column=Column(no_wrap=False))]
    name, status = "{task.description}", "{task.fields[status]}"
    bar, count = BarColumn(bar_width=20), MofNCompleteColumn()
    return [TextColumn(name, markup=False), bar, count, TextColumn(status, markup=False)]


class Monitor:
    """Follows the runs of some folders in a thread."""

    def __init__(self, folders: Sequence[Path], console: Console) -> None:
        self.progress = Progress(
            *line_columns(console.width), console=console, disable=not console.is_terminal
        )
        self._followed = [_Followed(folder, self.progress) for folder in folders]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Monitor:
        self.progress.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for followed in self._followed:
            followed.poll()
        self.progress.stop()

    def _follow(self) -> None:
        while not self._over.wait(0.2):
            for followed in self._followed:
                followed.poll()


class _Followed:
    """One run: the position in its log, and its last entries."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        setting = setting_of(folder)
        self.path, self.progress = log_path(folder, 0), progress
        self.workers, self.unit = setting.workers, origin_of(folder)["unit"]
        self.bar = progress.add_task(f"{setting.method} seed {setting.seed}", total=setting.steps, status="")
        self._read = 0
        self._steps: list[dict[str, Any]] = []
        self._round: dict[str, Any] = {}
        self._sent = 0

    def poll(self) -> None:
        """Read the new lines."""
        if not self.path.exists():
            return
        size = self.path.stat().st_size
        if size < self._read:  # a resumed run has shortened its log
            self._read, self._sent, self._steps = 0, 0, []
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))
        if self._steps:
            self.progress.update(self.bar, completed=self._steps[-1]["step"], status=self._status())

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "steps":
            self._steps = [*self._steps[-49:], entry]
        elif entry["kind"] == "round":
            self._round = entry
            self._sent += entry["sent"]

    def _status(self) -> str:
        """Loss, speed, exposed share, bytes, period and drift over the last steps."""
        steps = self._steps
        seconds = sum(entry["seconds"] for entry in steps) or 1.0
        exposed = sum(entry["exposed"] for entry in steps) / seconds
        units = steps[-1]["units"] - (steps[0]["units"] if len(steps) > 1 else 0)
        seen = seconds if len(steps) == 1 else seconds - steps[0]["seconds"]
        words = [
            f"loss {steps[-1]['loss']:.3f}",
            f"{self.workers * units / (seen or 1.0):,.0f} {self.unit}/s",
        ]
        words += [f"exposed {exposed:.0%}", f"{self._sent / 1e6:.1f} MB"]
        if self._round:
            words.append(f"period {self._round['period']}")
            if self._round["drift"] is not None:
                words.append(f"drift {self._round['drift']:.2g}")
        return "  ".join(words)
