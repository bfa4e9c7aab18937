"""The whole model, as the worker last published it, for a sidecar that may send it at any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.comm.background import Sidecar
from offbeat.waitfree.attendance import Kind
from offbeat.waitfree.rounds import Outcome, sync_device


class Snapshots:
    """Two snapshots, so that one is written while the other is copied, and two rooms, so that a round can
    begin while the result of the one before is read. Nobody waits longer than a copy takes."""

    def __init__(self, tensors: Mapping[str, Tensor], version: int, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.device = next(iter(tensors.values())).device
        self._shots = [Packed.like(tensors) for _ in range(2)]
        self._rooms = [Packed.like(tensors) for _ in range(2)]
        self._newest, self._version = 0, version
        self._shots[0].read(list(tensors.values()))
        sync_device(self._shots[0])
        self._copied: int | None = None  # the snapshot that is being copied
        self._read: int | None = None  # the room whose result is being read

    def meet(self, tensors: Sequence[Tensor]) -> None:
        """In the worker: everybody has these."""
        self.write(tensors)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker: make the next snapshot."""
        spare = 1 - self._newest
        with self._sidecar.locked():
            self._sidecar.until(lambda: self._copied != spare, "a copy of the model")
        self._shots[spare].read(tensors)
        sync_device(self._shots[spare])

    def publish(self, version: int) -> None:
        """What is shared being locked: what was written is the newest."""
        self._newest, self._version = 1 - self._newest, version

    def take(self, round: int) -> tuple[Packed, int]:
        room = self._rooms[round % 2]
        with self._sidecar.locked():
            self._sidecar.until(lambda: self._read != round % 2, "a result to be read")
            self._copied, version = self._newest, self._version
        for flat, shot in zip(room.flats, self._shots[self._copied].flats, strict=True):
            flat.copy_(shot)
        with self._sidecar.locked():
            self._copied = None
        return room, version

    def bring(self, mean: Packed) -> None:
        """It lies in its room."""

    def fetch(self, outcome: Outcome) -> None:
        self._read = outcome.round % 2

    def merge(self, tensors: Sequence[Tensor], outcome: Outcome, kind: Kind) -> None:
        """In the worker: the mean of the group; who is late comes to it as one worker more, once."""
        if outcome.mean is not None and kind != "nothing new":
            join(tensors, outcome.mean, outcome.workers, late=kind == "late")
            sync_device(outcome.mean)  # lest the next round begins while it is read
        with self._sidecar.locked():
            self._read = None


def join(tensors: Sequence[Tensor], mean: Packed, workers: int, *, late: bool) -> None:
    """The mean of a group of so many, or the mean with one more."""
    if not late:
        mean.write(tensors)
        return
    for x, m in zip(tensors, mean.views, strict=True):
        x.copy_((workers * m + x) / (workers + 1))
