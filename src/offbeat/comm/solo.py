"""A world of one worker."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.comm.background import Sidecar, TaskQueue
from offbeat.comm.collective import Collective
from offbeat.comm.communicator import Communicator, PendingList, Tensors, Worker, arrived
from offbeat.comm.presence import Departure


class Solo(Communicator, Worker):
    """The only worker: every message has already arrived."""

    rank, size = 0, 1

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        return arrived(list(tensors))

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self

    def leave(self, departure: Departure) -> None:
        pass

    def duplicate(self) -> Communicator:
        return self

    def task_queue(self) -> TaskQueue:
        return TaskQueue()

    def sidecar(self) -> Sidecar:
        raise NotImplementedError("Solo.sidecar(): a world of one has no rounds to run in a second thread.")
