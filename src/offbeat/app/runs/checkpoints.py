"""Checkpoints of all ranks on disk. A checkpoint is complete once every rank has written its file."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from offbeat.base.errors import CheckpointMismatch

KEPT = 2
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, OSError
)  # fmt: skip


class CheckpointStore:
    """The folder where the ranks of one run keep their checkpoints."""

    def __init__(self, folder: Path, *, rank: int, workers: int) -> None:
        self.folder, self.rank, self.workers = folder, rank, workers

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file in one piece, and delete all but the last two checkpoints."""
        place = self._path(step)
        place.mkdir(parents=True, exist_ok=True)
        beside = place / f".rank-{self.rank}.{os.getpid()}"
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place / f"rank-{self.rank}.pt")
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
            for path in place.glob(f".rank-{self.rank}.*"):
                path.unlink()
            if saved > step:
                (place / f"rank-{self.rank}.pt").unlink(missing_ok=True)

    def load(self, step: int) -> dict[str, Any]:
        """This rank's state. Checks the checksums in the file first, which torch does not do."""
        path = self._path(step) / f"rank-{self.rank}.pt"
        try:
            with zipfile.ZipFile(path) as file:
                if bad := file.testzip():
                    raise zipfile.BadZipFile(f"wrong checksum of {bad}")
                # torch writes none. Checksums do not cover them, and a folder would be read as nothing.
                if any(entry.external_attr for entry in file.infolist()):
                    raise zipfile.BadZipFile("wrong attributes")
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except _DAMAGED as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointMismatch(
                f"Rank {self.rank}'s checkpoint {str(path)!r} is damaged ({reason}): "
                f"delete the folder {str(path.parent)!r} to continue from the checkpoint before it."
            ) from error
        return state

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def _places(self) -> list[tuple[int, Path]]:
        """The folders of checkpoints, complete or not, each with its step."""
        places = [(place.name.removeprefix("step-"), place) for place in self.folder.glob("step-*")]
        return [(int(step), place) for step, place in places if step.isdecimal()]
