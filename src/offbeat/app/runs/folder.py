"""The folder of a run: its setting, its origin, one log per rank, checkpoints."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.app.runs.record import entries, log_path
from offbeat.app.runs.setting import Setting, write_whole
from offbeat.base.errors import BadArgument
from offbeat.tasks import Task

SETTING, ORIGIN = "setting.json", "origin.json"


def prepare(folder: Path, setting: Setting, task: Task, *, command: Sequence[str] = ()) -> None:
    """Make the folder and write the run's setting and origin. The default command is the running one."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": list(command or ["offbeat", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "offbeat": offbeat.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "unit": task.unit,
        "parameters": sum(p.numel() for p in task.model().parameters()),
    }
    write_whole(folder / ORIGIN, json.dumps(origin, indent=1))
    setting.save(folder / SETTING)


def prepare_all(place: Path, runs: Mapping[str, tuple[Setting, Task]]) -> list[Path]:
    """Prepare a folder for each named run that has none. Refuse a folder that holds another run."""
    for name, (setting, _) in runs.items():
        if (place / name / SETTING).exists() and setting_of(place / name) != setting:
            raise BadArgument("out", str(place), "this folder holds other runs; name another one.")
    for name, (setting, task) in runs.items():
        if not (place / name / SETTING).exists():
            prepare(place / name, setting, task)
    return [place / name for name in runs]


def setting_of(folder: Path) -> Setting:
    try:
        return Setting.load(folder / SETTING)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(folder / SETTING)!r} does not describe a run ({error!r}).") from error


def origin_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / ORIGIN).read_text())
    return values


def find(roots: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below these, sorted."""
    found = sorted({path.parent for root in roots for path in root.rglob(SETTING)})
    if not found:
        where = ", ".join(map(str, roots))
        raise ValueError(f"There is no run in {where}: no folder below it has a {SETTING}.")
    return found


def finished(folder: Path) -> bool:
    """Whether every rank has written its last line."""
    workers = setting_of(folder).workers
    return all(any(e["kind"] == "end" for e in entries(log_path(folder, rank))) for rank in range(workers))


def cache_of(folder: Path) -> Path:
    """Where decoded data is kept, shared by all runs next to this one."""
    return folder.parent / ".cache"


def slug(method: str) -> str:
    """The method as part of a file name."""
    return re.sub(r"[^a-z0-9_.]+", "-", method.lower()).strip("-")
