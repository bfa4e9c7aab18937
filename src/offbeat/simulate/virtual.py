"""One simulated worker's view of its peers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.comm.communicator import Communicator, sum_in_order, words
from offbeat.comm.departure import Departure
from offbeat.comm.pending import Pending
from offbeat.comm.place import Track
from offbeat.comm.sidecar import Sidecar
from offbeat.comm.task_queue import TaskQueue, VirtualQueue
from offbeat.simulate.call import Call, Settle
from offbeat.simulate.scheduler import Path, Scheduler
from offbeat.simulate.sidecar import VirtualSidecar


class Virtual(Communicator):
    """One simulated worker's view of its peers."""

    def __init__(self, scheduler: Scheduler, path: Path, me: int, actor: int) -> None:
        self._scheduler, self._path, self._me, self._actor = scheduler, path, me, actor
        self._members = path[-1]
        self.rank, self.size = self._members.index(me), len(self._members)
        self._number = {"data": 0, "control": 0}
        self._twins = self._runs = 0

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        given = list(tensors)

        def resolve(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[sum_in_order(place) for place in zip(*posts, strict=True)]] * len(posts)

        @torch.no_grad()
        def take(sums: list[Tensor]) -> list[Tensor]:
            for mine, total in zip(given, sums, strict=True):
                mine.copy_(total)  # not before it is wanted: then it is still in the cache
            return given

        return self._post("mean", given, resolve).then(take)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        def resolve(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[0].clone() for post in posts] for _ in posts]

        return self._post("gather", [tensor], resolve)

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        def resolve(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[rank].clone() for post in posts] for rank in range(len(posts))]

        return self._post("exchange", list(chunks), resolve)

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        def resolve(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            for rank, post in enumerate(posts):
                for tensor, original in zip(post, posts[src], strict=True):
                    if rank != src:
                        tensor.copy_(original)
            return posts

        return self._post("broadcast", list(tensors), resolve)

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        def resolve(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[posts[rank - 1][0].clone()] for rank in range(len(posts))]

        return self._post("shift", [tensor], resolve).then(lambda got: got[0])

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        def resolve(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[torch.stack([post[0] for post in posts])]] * len(posts)

        heard = self._post("gather", [words(numbers)], resolve, lane="control")
        return heard.then(lambda parts: parts[0].tolist())

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        members = tuple(self._members[rank] for rank in mine)
        return member(self._scheduler, (*self._path, members), self._me, self._actor)

    def duplicate(self) -> Communicator:
        return member(self._scheduler, self._beside(), self._me, self._actor)

    def task_queue(self) -> TaskQueue:
        made = VirtualQueue(self.now, functools.partial(self._scheduler.clocks.__setitem__, self._actor))
        self._scheduler.task_queues.setdefault(self._actor, []).append(made)
        return made

    def sidecar(self) -> Sidecar:
        path = self._beside()
        return VirtualSidecar(
            self._scheduler, self._me, path, lambda actor: member(self._scheduler, path, self._me, actor)
        )

    def _beside(self) -> Path:
        self._twins += 1
        return (*self._path, (-self._twins,), self._members)

    def leave(self, departure: Departure) -> None:
        self._scheduler.farewells.setdefault(self._me, departure)

    def follow(self, track: Track) -> None:
        self._runs += 1
        track.key = f"{self._path}/run {self._runs}"
        self._scheduler.tracks.add(track)

    def now(self) -> float:
        return self._scheduler.clocks[self._actor]

    def computed(self, step: int) -> None:
        self._scheduler.computed(self._me, step)

    def _post(
        self, kind: str, tensors: list[Tensor], resolve: Settle, lane: str = "data"
    ) -> Pending[list[Tensor]]:
        number = self._number[lane]
        self._number[lane] += 1
        call = self._scheduler.calls.setdefault((self._path, lane, number), Call(self._members))
        call.post(self._me, kind, tensors, self.now())
        if call.complete:
            del self._scheduler.calls[self._path, lane, number]
            call.resolve(resolve, self._scheduler.traffic, queue=lane == "data")

        def wait() -> list[Tensor]:
            self._scheduler.wait(self._actor, call)
            return call.results[self.rank]

        return Pending(wait, lambda: self._scheduler.has_landed(self._actor, call), lambda: call.lands)


def member(scheduler: Scheduler, path: Path, me: int, actor: int | None = None) -> Communicator:
    """The one view `me` has of this communicator: its messages are numbered there."""
    view = Virtual(scheduler, path, me, me if actor is None else actor)
    return scheduler.views.setdefault((path, me), view)
