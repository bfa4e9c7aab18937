"""Checkpoints of all ranks on disk: a step counts once every rank's file is there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

KEPT = 2


class Shelf:
    """The folder in which the ranks of one run keep their checkpoints."""

    def __init__(self, folder: Path, *, rank: int, workers: int) -> None:
        self.folder, self.rank, self.workers = folder, rank, workers

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file beside, move it to its place, and drop what is older than the last two."""
        place = self._at(step)
        place.mkdir(parents=True, exist_ok=True)
        beside = place / f".rank-{self.rank}.{os.getpid()}"
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place / f"rank-{self.rank}.pt")
        if self.rank == 0:
            for old in self.whole()[:-KEPT]:
                shutil.rmtree(self._at(old), ignore_errors=True)

    def whole(self) -> list[int]:
        """The steps at which every rank has saved, in order."""
        found = []
        for place in self.folder.glob("step-*"):
            files = {file.name for file in place.glob("rank-*.pt")}
            if files == {f"rank-{rank}.pt" for rank in range(self.workers)}:
                found.append(int(re.sub(r"\D", "", place.name)))
        return sorted(found)

    def load(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self._at(step) / f"rank-{self.rank}.pt", weights_only=True)
        return state

    def _at(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"
