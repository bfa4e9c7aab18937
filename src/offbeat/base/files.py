"""Files of tensors that are either complete or absent."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import default_restore_location

from offbeat.base.clock import State

_DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, OSError
)  # fmt: skip


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to. Unless the block raises, the file atomically replaces `path`, on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name as well
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def write_state(path: Path, state: State) -> None:
    """Write a state atomically: a reader sees all of the file, or none of it."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def delete_torn(path: Path) -> None:
    """Delete files left by processes that were killed during `write_state`. The name may be a pattern."""
    for temporary in path.parent.glob(f".{path.name}.*"):
        temporary.unlink(missing_ok=True)


def find_damage(path: Path) -> str | None:
    """Check the file against the checksums in it, which torch does not. Return what is wrong, or None."""
    try:
        with zipfile.ZipFile(path) as file:
            if bad := file.testzip():
                return f"wrong checksum of {bad}"
            # torch sets none. Checksums do not cover them, and an entry marked as a folder reads as empty.
            return "wrong attributes" if any(entry.external_attr for entry in file.infolist()) else None
    except _DAMAGED as error:
        return str(error).partition("\n")[0] or type(error).__name__


def read_state(path: Path) -> State:
    """Return what `write_state` wrote. A ValueError says what is wrong with the file."""
    if damage := find_damage(path):
        raise ValueError(damage)
    return load_plain(path)


def load_plain(file: Path | BinaryIO, devices: Sequence[str] = ()) -> State:
    """Return the state in a complete file. A ValueError says in one sentence why torch refuses it.

    Tensors are loaded to the device they were saved from, or to the first of `devices` if that is not one.
    """
    try:
        state: State = torch.load(file, map_location=partial(_place, devices), weights_only=True)
    except _DAMAGED as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))  # torch uses many lines with colours
        holds = f"it holds a {foreign[1]}, and files are read with weights_only=True" if foreign else None
        raise ValueError(holds or str(error).partition("\n")[0]) from error
    return state


def _place(devices: Sequence[str], storage: Any, saved: str) -> Any:
    place = saved if saved in ("cpu", *devices) else next(iter(devices), "cpu")
    return default_restore_location(storage, place)  # type: ignore[no-untyped-call]
