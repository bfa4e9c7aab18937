"""The folder of a run: what was asked for, what it was run with, one log per rank, checkpoints."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.app.runs.record import entries, log_path
from offbeat.app.runs.setting import Setting, write_whole

SETTING, ORIGIN = "setting.json", "origin.json"


def prepare(folder: Path, setting: Setting, *, command: Sequence[str], unit: str, parameters: int) -> None:
    """Make the folder, with what the run is and where it comes from."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": list(command),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "offbeat": offbeat.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "unit": unit,
        "parameters": parameters,
    }
    write_whole(folder / ORIGIN, json.dumps(origin, indent=1))
    setting.save(folder / SETTING)


def setting_of(folder: Path) -> Setting:
    try:
        return Setting.load(folder / SETTING)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(folder / SETTING)!r} is not of a run of Offbeat's ({error!r}).") from error


def origin_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / ORIGIN).read_text())
    return values


def find(roots: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below these, sorted; an error where there are none."""
    found = sorted({path.parent for root in roots for path in root.rglob(SETTING)})
    if not found:
        raise ValueError(
            f"There is no run in {', '.join(str(root) for root in roots)}: no {SETTING} below it."
        )
    return found


def finished(folder: Path) -> bool:
    """Whether every rank has written its last line."""
    workers = setting_of(folder).workers
    return all(any(e["kind"] == "end" for e in entries(log_path(folder, rank))) for rank in range(workers))


def cache_of(folder: Path) -> Path:
    """Where decoded data may be kept, for all runs beside this one."""
    return folder.parent / ".cache"


def slug(method: str) -> str:
    """The method as a part of a file's name."""
    return re.sub(r"[^a-z0-9_.]+", "-", method.lower()).strip("-")
