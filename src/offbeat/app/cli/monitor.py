"""A progress bar that follows the log of rank 0."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

from offbeat.app.runs.folder import log_path, origin_of, setting_of

WIDE = 140  # columns of a run's line, with a method of the usual length


def line_columns(width: int) -> list[ProgressColumn]:
    """The columns of a run's line. A narrow terminal gets two lines without a bar."""
    name, status = "{task.description}", "{task.fields[status]}"
    if width < WIDE:
        text = f"{name}\n  {{task.completed:.0f}}/{{task.total:.0f}}  {status}"
        return [TextColumn(text, markup=False, table_column=Column(no_wrap=False))]
    bar = BarColumn(bar_width=20)
    return [TextColumn(name, markup=False), bar, MofNCompleteColumn(), TextColumn(status, markup=False)]


@contextmanager
def show_progress(folders: Sequence[Path]) -> Iterator[None]:
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
        """Read the new lines."""
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
        if self._round:
            words.append(f"period {self._round['period']}")
            if self._round["drift"] is not None:
                words.append(f"drift {self._round['drift']:.2g}")
        return "  ".join(words)
