"""One simulated worker's view of its peers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.comm.communicator import Communicator, sum_in_order, words
from offbeat.comm.departure import Farewell
from offbeat.comm.pending import Pending
from offbeat.comm.place import Track
from offbeat.comm.sidecar import Companion
from offbeat.comm.task_queue import Courier, Lazy
from offbeat.simulate.call import Call, Settle
from offbeat.simulate.scheduler import Path, Stage
from offbeat.simulate.sidecar import Understudy


class Virtual(Communicator):
    """One simulated worker's view of its peers."""

    def __init__(self, stage: Stage, path: Path, me: int, actor: int) -> None:
        self._stage, self._path, self._me, self._actor = stage, path, me, actor
        self._members = path[-1]
        self.rank, self.size = self._members.index(me), len(self._members)
        self._number = {"data": 0, "control": 0}
        self._twins = self._runs = 0

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        given = list(tensors)

        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[sum_in_order(place) for place in zip(*posts, strict=True)]] * len(posts)

        @torch.no_grad()
        def take(sums: list[Tensor]) -> list[Tensor]:
            for mine, total in zip(given, sums, strict=True):
                mine.copy_(total)  # not before it is wanted: then it is still in the cache
            return given

        return self._post("mean", given, settle).then(take)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[0].clone() for post in posts] for _ in posts]

        return self._post("gather", [tensor], settle)

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[rank].clone() for post in posts] for rank in range(len(posts))]

        return self._post("exchange", list(chunks), settle)

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            for rank, post in enumerate(posts):
                for tensor, original in zip(post, posts[src], strict=True):
                    if rank != src:
                        tensor.copy_(original)
            return posts

        return self._post("broadcast", list(tensors), settle)

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[posts[rank - 1][0].clone()] for rank in range(len(posts))]

        return self._post("shift", [tensor], settle).then(lambda got: got[0])

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[torch.stack([post[0] for post in posts])]] * len(posts)

        heard = self._post("gather", [words(numbers)], settle, lane="control")
        return heard.then(lambda parts: parts[0].tolist())

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        members = tuple(self._members[rank] for rank in mine)
        return member(self._stage, (*self._path, members), self._me, self._actor)

    def twin(self) -> Communicator:
        return member(self._stage, self._beside(), self._me, self._actor)

    def courier(self) -> Courier:
        made = Lazy(self.now, functools.partial(self._stage.clocks.__setitem__, self._actor))
        self._stage.couriers.setdefault(self._actor, []).append(made)
        return made

    def companion(self) -> Companion:
        path = self._beside()
        return Understudy(
            self._stage, self._me, path, lambda actor: member(self._stage, path, self._me, actor)
        )

    def _beside(self) -> Path:
        self._twins += 1
        return (*self._path, (-self._twins,), self._members)

    def leave(self, farewell: Farewell) -> None:
        self._stage.farewells.setdefault(self._me, farewell)

    def follow(self, track: Track) -> None:
        self._runs += 1
        track.key = f"{self._path}/run {self._runs}"
        self._stage.tracks.add(track)

    def now(self) -> float:
        return self._stage.clocks[self._actor]

    def computed(self, step: int) -> None:
        self._stage.computed(self._me, step)

    def _post(
        self, kind: str, tensors: list[Tensor], settle: Settle, lane: str = "data"
    ) -> Pending[list[Tensor]]:
        number = self._number[lane]
        self._number[lane] += 1
        call = self._stage.calls.setdefault((self._path, lane, number), Call(self._members))
        call.post(self._me, kind, tensors, self.now())
        if call.complete:
            del self._stage.calls[self._path, lane, number]
            call.settle(settle, self._stage.traffic, queue=lane == "data")

        def wait() -> list[Tensor]:
            self._stage.wait(self._actor, call)
            return call.results[self.rank]

        return Pending(wait, lambda: self._stage.has_landed(self._actor, call), lambda: call.lands)


def member(stage: Stage, path: Path, me: int, actor: int | None = None) -> Communicator:
    """The one view `me` has of this communicator: its messages are numbered there."""
    view = Virtual(stage, path, me, me if actor is None else actor)
    return stage.views.setdefault((path, me), view)
