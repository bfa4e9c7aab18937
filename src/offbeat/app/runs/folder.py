"""The folder of a run: its setting, its origin, one log per rank, checkpoints."""

import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.app.runs.setting import Setting
from offbeat.base.errors import BadArgument, CheckpointMismatch
from offbeat.base.files import delete_torn, read_state, write_state
from offbeat.tasks import Task

SETTING, ORIGIN = "setting.json", "origin.json"
KEPT = 2  # checkpoints
LINES = 2000  # of steps in a log, at most; in a longer run, each covers several steps

Entry = dict[str, Any]


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one piece: a reader sees all of the old text or all of the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def prepare(folder: Path, setting: Setting, task: Task, *, command: Sequence[str] = ()) -> None:
    """Make the folder and write the run's setting and origin. The default command is the running one."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": list(command or ["offbeat", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "offbeat": offbeat.__version__,
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.platform(),
        "cores": os.cpu_count(), "unit": task.unit,
        "parameters": sum(p.numel() for p in task.model().parameters()),
    }  # fmt: skip
    write_whole(folder / ORIGIN, json.dumps(origin, indent=1))
    write_whole(folder / SETTING, json.dumps(asdict(setting), indent=1))


def prepare_all(place: Path, runs: Mapping[str, tuple[Setting, Task]]) -> list[Path]:
    """Prepare a folder for each named run that has none. Refuse a folder that holds another run."""
    new = {name: run for name, run in runs.items() if not (place / name / SETTING).exists()}
    if any(setting_of(place / name) != setting for name, (setting, _) in runs.items() if name not in new):
        raise BadArgument("out", str(place), "this folder holds other runs; name another one.")
    for name, (setting, task) in new.items():
        prepare(place / name, setting, task)
    return [place / name for name in runs]


def setting_of(folder: Path) -> Setting:
    path = folder / SETTING
    try:
        values = json.loads(path.read_text())
        return Setting(**{**values, "straggler": tuple(values["straggler"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} does not describe a run ({error!r}).") from error


def origin_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / ORIGIN).read_text()))


def find(roots: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below these, sorted."""
    found = sorted({path.parent for root in roots for path in root.rglob(SETTING)})
    if not found:
        where = ", ".join(map(str, roots))
        raise ValueError(f"There is no run in {where}: no folder below it has a {SETTING}.")
    return found


def finished(folder: Path) -> bool:
    """Whether every rank has written its last line."""
    logs = [log_path(folder, rank) for rank in range(setting_of(folder).workers)]
    return all(any(entry["kind"] == "end" for entry in entries(log)) for log in logs)


def cache_of(folder: Path) -> Path:
    """Where decoded data is kept, shared by all runs next to this one."""
    return folder.parent / ".cache"


def slug(method: str) -> str:
    """The method as part of a file name."""
    return re.sub(r"[^a-z0-9_.]+", "-", method.lower()).strip("-")


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def entries(path: Path) -> Iterator[Entry]:
    """The lines of a log, up to the first one that a kill has torn."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if not line.endswith("\n"):
            return
        if "waited" in entry:  # older logs
            entry["exposed"] = entry.pop("waited")
        yield entry


class Record:
    """The log of a rank: JSON lines, each written at once, so a killed process loses at most its last."""

    def __init__(self, path: Path, *, steps: int = 0) -> None:
        self._file = path.open("a", buffering=1)
        self.units, self._every = 0, -(-steps // LINES)
        self._count, self._seconds, self._exposed, self._loss = 0, 0.0, 0.0, 0.0

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def add_step(
        self, step: int, *, start: float, end: float, exposed: float, loss: float, units: int
    ) -> None:
        """Count a step. A long run writes one line for several."""
        self._count += 1
        self._seconds += end - start
        self._exposed += exposed
        self._loss += loss
        self.units += units
        if self._count == self._every:
            self.write_steps(step, end)

    def write_steps(self, step: int, end: float) -> None:
        """Write the steps since the last line."""
        if self._count:
            mean = {"seconds": self._seconds, "exposed": self._exposed, "loss": self._loss / self._count}
            self.write("steps", step=step, t=end, **mean, units=self.units)
        self._count, self._seconds, self._exposed, self._loss = 0, 0.0, 0.0, 0.0

    def close(self) -> None:
        self._file.close()


def cut(path: Path, *, after: int) -> None:
    """Drop the lines after a step; the resumed run writes them again."""
    kept = [entry for entry in entries(path) if entry["step"] <= after and entry["kind"] != "end"]
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept))


class CheckpointStore:
    """The checkpoints of all ranks of a run. One is complete once every rank has written its file."""

    def __init__(self, folder: Path, *, rank: int, workers: int) -> None:
        self.folder, self.rank, self.workers = folder, rank, workers

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file in one piece, and delete all but the last two checkpoints."""
        write_state(self._path(step) / f"rank-{self.rank}.pt", state)
        if self.rank == 0:
            for old in self.steps()[:-KEPT]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        whole = {f"rank-{rank}.pt" for rank in range(self.workers)}
        files = {step: {path.name for path in place.glob("rank-*.pt")} for step, place in self._places()}
        return sorted(step for step, names in files.items() if names == whole)

    def delete_after(self, step: int) -> None:
        """Delete what an earlier start of the run has left: this rank's later files, and torn ones."""
        for saved, place in self._places():
            delete_torn(place / f"rank-{self.rank}.pt")
            if saved > step:
                (place / f"rank-{self.rank}.pt").unlink(missing_ok=True)

    def load(self, step: int) -> dict[str, Any]:
        """This rank's state. Checks the checksums in the file first, which torch does not do."""
        path = self._path(step) / f"rank-{self.rank}.pt"
        try:
            return read_state(path)
        except ValueError as error:
            advice = f"delete the folder {str(path.parent)!r} to continue from the checkpoint before it."
            sentence = f"Rank {self.rank}'s checkpoint {str(path)!r} is damaged ({error}): {advice}"
            raise CheckpointMismatch(sentence) from error

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def _places(self) -> list[tuple[int, Path]]:
        """The folders of checkpoints, complete or not, each with its step."""
        places = [(place.name.removeprefix("step-"), place) for place in self.folder.glob("step-*")]
        return [(int(step), place) for step, place in places if step.isdecimal()]
