"""A progress bar that reads the log of rank 0 while the run writes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

from offbeat.app.runs.folder import origin_of, setting_of
from offbeat.app.runs.record import log_path

WIDE = 140  # columns that a run's line takes, with a name of the usual length


def bar(width: int) -> list[ProgressColumn]:
    """What a run's line consists of; in a narrow terminal two lines without a bar, wrapped where need be."""
    if width < WIDE:
        text = "{task.description}\n  {task.completed:.0f}/{task.total:.0f}  {task.fields[told]}"
        return [TextColumn(text, markup=False, table_column=Column(no_wrap=False))]
    name, told = "{task.description}", "{task.fields[told]}"
    return [
        TextColumn(name, markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn(told, markup=False),
    ]


class Monitor:
    """Follows the runs of some folders, in a thread, until it is left."""

    def __init__(self, folders: Sequence[Path], console: Console) -> None:
        self.progress = Progress(*bar(console.width), console=console, disable=not console.is_terminal)
        self._followed = [_Followed(folder, self.progress) for folder in folders]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Monitor:
        self.progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for followed in self._followed:
            followed.look()
        self.progress.stop()

    def _follow(self) -> None:
        while not self._over.wait(0.2):
            for followed in self._followed:
                followed.look()


class _Followed:
    """One run: where we are in its log, and what it has told."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        setting = setting_of(folder)
        self.path, self.progress = log_path(folder, 0), progress
        self.workers, self.unit = setting.workers, origin_of(folder)["unit"]
        self.bar = progress.add_task(f"{setting.method} seed {setting.seed}", total=setting.steps, told="")
        self._read = 0
        self._steps: list[dict[str, Any]] = []
        self._round: dict[str, Any] = {}
        self._sent = 0

    def look(self) -> None:
        """Read what is new, up to the last whole line."""
        if not self.path.exists():
            return
        size = self.path.stat().st_size
        if size < self._read:  # a resumed run has cut its log
            self._read, self._sent, self._steps = 0, 0, []
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))
        if self._steps:
            self.progress.update(self.bar, completed=self._steps[-1]["step"], told=self.told())

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "steps":
            self._steps = [*self._steps[-49:], entry]
        elif entry["kind"] == "round":
            self._round = entry
            self._sent += entry["sent"]

    def told(self) -> str:
        """Loss, speed, share of time waiting, bytes, period and drift, of the last steps."""
        steps = self._steps
        seconds = sum(entry["seconds"] for entry in steps) or 1.0
        waiting = sum(entry["waited"] for entry in steps) / seconds
        units = steps[-1]["units"] - (steps[0]["units"] if len(steps) > 1 else 0)
        seen = seconds if len(steps) == 1 else seconds - steps[0]["seconds"]
        told = [f"loss {steps[-1]['loss']:.3f}", f"{self.workers * units / (seen or 1.0):,.0f} {self.unit}/s"]
        told += [f"waiting {waiting:.0%}", f"{self._sent / 1e6:.1f} MB"]
        if self._round:
            told.append(f"period {self._round['period']}")
            if self._round["drift"] is not None:
                told.append(f"drift {self._round['drift']:.2g}")
        return "  ".join(told)
