"""One simulated worker's view of its peers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from offbeat.comm.background import Sidecar, TaskQueue
from offbeat.comm.collective import Collective
from offbeat.comm.communicator import Communicator, Pending, Worker
from offbeat.comm.presence import Departure, Track
from offbeat.simulate.background import VirtualQueue, VirtualSidecar
from offbeat.simulate.scheduler import Path, Scheduler
from offbeat.simulate.waits import Call, Post


class Virtual(Communicator, Worker):
    """One simulated worker's view of its peers."""

    def __init__(self, scheduler: Scheduler, path: Path, me: int, actor: int) -> None:
        self._scheduler, self._path, self._me, self._actor = scheduler, path, me, actor
        self._members = path[-1]
        self.rank, self.size = self._members.index(me), len(self._members)
        self._number = {"data": 0, "control": 0}
        self._duplicates = self._runs = 0

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        lane, given, scheduler = "control" if control else "data", list(tensors), self._scheduler
        key = (self._path, lane, self._number[lane])
        self._number[lane] += 1
        call = scheduler.calls.setdefault(key, Call(self._members))
        call.post(self._me, Post(kind, given, self.now()))
        if not call.missing:
            del scheduler.calls[key]
            call.resolve(src, scheduler.traffic, queue=not control)

        def wait() -> list[Tensor]:
            scheduler.wait(self._actor, call)
            return kind.deliver(given, call.results[self.rank])

        return Pending(wait, lambda: scheduler.has_landed(self._actor, call), lambda: call.lands)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        members = tuple(self._members[rank] for rank in mine)
        return member(self._scheduler, (*self._path, members), self._me, self._actor)

    @property
    def worker(self) -> Worker:
        return self

    def duplicate(self) -> Communicator:
        return member(self._scheduler, self._path_beside(), self._me, self._actor)

    def task_queue(self) -> TaskQueue:
        queue = VirtualQueue(self.now, functools.partial(self._scheduler.clocks.__setitem__, self._actor))
        self._scheduler.task_queues.setdefault(self._actor, []).append(queue)
        return queue

    def sidecar(self) -> Sidecar:
        path = self._path_beside()
        return VirtualSidecar(
            self._scheduler, self._me, path, lambda actor: member(self._scheduler, path, self._me, actor)
        )

    def _path_beside(self) -> Path:
        self._duplicates += 1
        return (*self._path, (-self._duplicates,), self._members)

    def leave(self, departure: Departure) -> None:
        self._scheduler.departures.setdefault(self._me, departure)

    def follow(self, track: Track) -> None:
        self._runs += 1
        track.key = f"{self._path}/run {self._runs}"
        self._scheduler.tracks.add(track)

    def now(self) -> float:
        return self._scheduler.clocks[self._actor]

    def computed(self, step: int) -> None:
        self._scheduler.computed(self._me, step)


def member(scheduler: Scheduler, path: Path, me: int, actor: int | None = None) -> Communicator:
    """The view that worker `me` has of a communicator. There is one, because it numbers the messages."""
    view = Virtual(scheduler, path, me, me if actor is None else actor)
    return scheduler.views.setdefault((path, me), view)
