"""The folder of a run: its setting, its origin, one log per rank, checkpoints."""

import fcntl
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import offbeat
from offbeat.app.runs.frames import FULL
from offbeat.app.runs.schema import ORIGIN_FILE, SETTING_FILE, Entry, read_entry, read_json
from offbeat.app.runs.setting import Setting
from offbeat.base.errors import BadArgument, CheckpointMismatch, OffbeatError
from offbeat.base.files import delete_torn, read_state, replacing, write_state
from offbeat.tasks import Task

SETTING, ORIGIN, MODEL = "setting.json", "origin.json", "model.pt"
KEPT = 2  # checkpoints
WORKERS = "workers"  # the file in a checkpoint with the number of workers, if others continue from it
LINES = 2000  # of steps in a log, at most; in a longer run, each covers several steps


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one piece: a reader sees all of the old text or all of the new."""
    with replacing(path) as beside:
        beside.write_text(text)


def prepare(
    folder: Path, setting: Setting, task: Task, *, command: Sequence[str] = (), **more: dict[str, Any]
) -> None:
    """Make the folder and write the run's setting and origin. The default command is the running one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = task.model()
    origin = {
        "command": list(command or ["offbeat", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "offbeat": offbeat.__version__,
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.platform(),
        "cores": os.cpu_count(), "unit": task.unit,
        "optimizer": _describe(setting.optimizer_of(task, model)),
        "parameters": sum(p.numel() for p in model.parameters()), **more,
    }  # fmt: skip
    write_whole(folder / ORIGIN, json.dumps(origin, indent=1))
    write_whole(folder / SETTING, json.dumps(asdict(setting), indent=1))


def _describe(optimizer: Optimizer) -> str:
    """The optimizer without its learning rate, as one would type it, with what is not torch's default."""
    usual = {name: p.default for name, p in signature(type(optimizer)).parameters.items()}
    given = [
        f"{name}={value!r}"
        for name, value in optimizer.defaults.items()
        if name != "lr" and name in usual and value != usual[name]
    ]
    return f"{type(optimizer).__name__}({', '.join(given)})"


def prepare_all(place: Path, runs: Mapping[str, tuple[Setting, Task]]) -> list[Path]:
    """Prepare a folder for each named run that has none. Refuse a folder that holds another run."""
    new = {name: run for name, run in runs.items() if not (place / name / SETTING).exists()}
    if not all(holds(place / name, setting) for name, (setting, _) in runs.items() if name not in new):
        raise BadArgument("out", str(place), "this folder holds other runs; name another one.")
    for name, (setting, task) in new.items():
        prepare(place / name, setting, task)
    return [place / name for name in runs]


def holds(folder: Path, setting: Setting) -> bool:
    """Whether there is a run of this setting in the folder."""
    return (folder / SETTING).exists() and setting_of(folder) == setting


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of this folder. The system releases the lock if this process is killed."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / ".lock").open("w")
    except OSError as error:
        reason = f"cannot be made or written ({error.strerror})."
        raise ValueError(f"The folder {str(folder)!r} {reason}") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(0, "Another process is training in this folder", str(folder)) from None
        yield


def write_model(folder: Path, model: nn.Module) -> None:
    """Save the weights and buffers of the trained model, for `torch.load` and `load_state_dict`."""
    with full_disk_said(path := folder / MODEL):
        write_state(path, dict(model.state_dict()))


@contextmanager
def full_disk_said(path: Path) -> Iterator[None]:
    """Turn what torch and the system say about a file that cannot be written into one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if "inline_container" in str(error) or getattr(error, "errno", 0) in FULL:
            reason = "the disk is full"  # torch reports only that a write has failed
        raise OffbeatError(f"Cannot write {str(path)!r}: {reason}.") from error


def setting_of(folder: Path) -> Setting:
    values = read_json(folder / SETTING, SETTING_FILE)
    return Setting(**{**values, "straggler": tuple(values.get("straggler", ()))})


def origin_of(folder: Path) -> dict[str, Any]:
    return read_json(folder / ORIGIN, ORIGIN_FILE)


def find(roots: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below these, sorted."""
    found = sorted({path.parent for root in roots for path in root.rglob(SETTING)})
    if not found:
        where = ", ".join(map(str, roots))
        raise ValueError(f"There is no run in {where}: no folder below it has a {SETTING}.")
    return found


def finished(folder: Path) -> bool:
    """Whether every rank has written its last line; where workers come and go, whether one has."""
    logs = [log_path(folder, rank) for rank in range(setting_of(folder).workers)]
    ended = [any(entry["kind"] == "end" for entry in entries(log)) for log in logs]
    elastic = (folder / ORIGIN).is_file() and "elastic" in origin_of(folder)
    return any(ended) if elastic else all(ended)


def cache_of(folder: Path) -> Path:
    """Where decoded data is kept, shared by all runs next to this one."""
    return folder.parent / ".cache"


def slug(method: str) -> str:
    """The method as part of a file name."""
    return re.sub(r"[^a-z0-9_.]+", "-", method.lower()).strip("-")


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def output_path(folder: Path, rank: int) -> Path:
    """What a rank has printed, with the traceback of an error."""
    return folder / f"rank-{rank}.txt"


def entries(path: Path, *, skipped: list[int] | None = None) -> Iterator[Entry]:
    """The lines of a log. The numbers of lines that are torn or foreign are added to `skipped`."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            entry = read_entry(line)
            if entry is not None:
                yield entry
            elif skipped is not None:
                skipped.append(number)


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
    """Drop the lines after a step; the resumed run writes them again. Drop what a finished run has written
    at its end, too: an extended run continues from the state before it."""
    read = list(entries(path))
    ended = any(entry["kind"] == "end" for entry in read)
    kept = [
        entry
        for entry in read
        if entry["kind"] != "end"
        and (entry["step"] < after or (entry["step"] == after and not (ended and entry["kind"] == "eval")))
    ]
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept))


class CheckpointStore:
    """The checkpoints of all ranks of a run. One is complete once every rank has written its file.

    One of another number of workers holds that number in a file of its own.
    """

    def __init__(self, folder: Path, *, rank: int, workers: int) -> None:
        self.folder, self.rank, self.workers = folder, rank, workers

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file in one piece, and delete all but the last two checkpoints."""
        with full_disk_said(path := self._path(step) / f"rank-{self.rank}.pt"):
            write_state(path, state)
        if self.rank == 0:
            for old in self.steps()[:-KEPT]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        files = {
            step: {path.name for path in place.glob("rank-*.pt") if path.is_file()}
            for step, place in self._places()
        }
        return sorted(
            step
            for step, names in files.items()
            if names == {f"rank-{rank}.pt" for rank in range(self.workers_of(step))}
        )

    def workers_of(self, step: int) -> int:
        """The number of workers that have written a checkpoint."""
        noted = self._path(step) / WORKERS
        return int(noted.read_text()) if noted.is_file() else self.workers

    def hand_over(self) -> None:
        """Another number of workers continues the run: note the number of these. Delete what is incomplete,
        because the others write files of the same names."""
        complete = self.steps()
        for step, place in self._places():
            if step not in complete:
                shutil.rmtree(place, ignore_errors=True)
            elif not (place / WORKERS).is_file():
                write_whole(place / WORKERS, str(self.workers))

    def delete_after(self, step: int) -> None:
        """Delete what an earlier start of the run has left: this rank's later files, and torn ones."""
        for saved, place in self._places():
            delete_torn(place / f"rank-{self.rank}.pt")
            if saved > step and (own := place / f"rank-{self.rank}.pt").is_file():
                own.unlink()

    def load(self, step: int, rank: int | None = None) -> dict[str, Any]:
        """The state of a rank, this one's by default. Checks the checksums in the file, as torch does not."""
        rank = self.rank if rank is None else rank
        path = self._path(step) / f"rank-{rank}.pt"
        try:
            return read_state(path)
        except ValueError as error:
            advice = f"delete the folder {str(path.parent)!r} to continue from the checkpoint before it."
            sentence = f"Rank {rank}'s checkpoint {str(path)!r} is damaged ({error}): {advice}"
            raise CheckpointMismatch(sentence) from error

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def _places(self) -> list[tuple[int, Path]]:
        """The folders of checkpoints, complete or not, each with its step."""
        places = [(place.name.removeprefix("step-"), place) for place in self.folder.glob("step-*")]
        return [(int(step), place) for step, place in places if step.isdecimal()]
