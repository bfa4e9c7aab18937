"""Workers that are processes, through torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, get_backend_config

from offbeat.comm import WORDS, Communicator, Farewell, Pending, nbytes, words
from offbeat.errors import PeerLost

T = TypeVar("T")

_GLANCE = 0.25  # seconds between two looks at who has left
_STORE_GONE = 5.0  # seconds to wait on after the store, which rank 0 may host, has vanished

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Torch(Communicator):
    """The ranks of a torch process group, on connections of Offbeat's own.

    The caller's collectives never interleave with ours. `timeout` is the longest wait for one message, in
    seconds; a rank that leaves or dies is noticed within about a second.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> None:
        if not timeout > 0:
            raise ValueError(f"Torch(timeout={timeout}): timeout must be a positive number of seconds.")
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise RuntimeError("Torch(): there is no process group: call init_process_group first.")
        # All members make their communicators in the same order, so the number is the same everywhere.
        _made[group] = _made.get(group, 0) + 1
        ranks = dist.get_process_group_ranks(group)
        backends = dict(item.split(":") for item in str(get_backend_config(group)).split(","))
        self._names = list(range(len(ranks)))  # what the ranks are called in errors
        self._join(f"offbeat/{group.group_name}/{ranks}/{_made[group]}", ranks, backends, timeout)

    def _join(self, key: str, ranks: list[int], backends: dict[str, str], timeout: float) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self._key, self._ranks, self._backends, self._timeout = key, ranks, backends, timeout
        self._store = _get_default_store()
        self._lanes: dict[str, _Lane] = {}
        self._children: dict[tuple[int, ...], Torch] = {}
        self._left = False
        self._lane("control")

    def _lane(self, name: str) -> _Lane:
        """The connections for control messages, or for tensors on a kind of device; opened when first used.

        `new_group` is of no use: it numbers groups per process, and hangs where some ranks have made others.
        """
        if name not in self._lanes:
            kind = "gloo" if name == "control" else self._backends[name]
            store = PrefixStore(f"{self._key}/{name}", self._store)
            self._lanes[name] = _Lane(_backend(kind, store, self.rank, self.size, self._timeout))
        return self._lanes[name]

    def mean(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        sent: list[Tensor] = []

        def calls() -> Iterator[_Call]:
            for tensor in tensors:
                sent.append(tensor)
                yield tensor, functools.partial(_sum, tensor)

        def scale(i: int) -> None:
            sent[i].mul_(1 / self.size)  # while it is warm in the cache, and the next one on its way

        return self._send(calls(), lambda: sent, lambda: f"the mean of {nbytes(sent):,} bytes", each=scale)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        given, parts = tensor.contiguous(), [torch.empty_like(tensor) for _ in range(self.size)]
        calls = [(tensor, lambda pg: pg.allgather([parts], [given]))]
        return self._send(calls, lambda: parts, lambda: f"a gathering of {nbytes([tensor]):,} bytes")

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        given, parts = [c.contiguous() for c in chunks], [torch.empty_like(c) for c in chunks]
        calls = [(chunks[0], lambda pg: pg.alltoall(parts, given))]
        return self._send(calls, lambda: parts, lambda: f"an exchange of {nbytes(chunks):,} bytes")

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        calls = [(t, lambda pg, t=t: pg.broadcast(t, root=src)) for t in tensors]
        return self._send(calls, lambda: list(tensors), lambda: f"rank {src}'s {nbytes(tensors):,} bytes")

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        given = words(numbers)
        parts = [torch.empty(WORDS, dtype=torch.int64) for _ in range(self.size)]
        calls = [(given, lambda pg: pg.allgather([parts], [given]))]
        return self._send(
            calls, lambda: [part.tolist() for part in parts], lambda: "word from all", lane="control"
        )

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = tuple(next(group for group in groups if self.rank in group))
        if mine not in self._children:
            child = Torch.__new__(Torch)
            ranks = [self._ranks[rank] for rank in mine]
            child._names = [self._names[rank] for rank in mine]
            child._join(f"{self._key}/{mine}", ranks, self._backends, self._timeout)
            self._children[mine] = child
        return self._children[mine]

    def leave(self, farewell: Farewell) -> None:
        for child in self._children.values():
            child.leave(farewell)
        if self._left:
            return
        self._left = True
        begun = {name: lane.begun for name, lane in self._lanes.items()}
        note = json.dumps({"text": farewell.text, "shared": farewell.shared, "begun": begun})
        try:
            self._store.set(f"{self._key}/left/{self.rank}", note)
            self._store.set(f"{self._key}/left", "yes")
        except dist.DistError:
            pass  # the store went with its host, and who waits for us sees our connections close

    def _send(
        self,
        calls: Iterable[_Call],
        result: Callable[[], T],
        what: Callable[[], str],
        *,
        lane: str | None = None,
        each: Callable[[int], None] | None = None,
    ) -> Pending[T]:
        """Start the calls; once all have arrived, the result. `each` follows the arrival of each of them."""
        times: list[float] = []
        works = []
        for tensor, call in calls:
            name = lane or tensor.device.type
            number = self._lane(name).begun
            self._lane(name).begun += 1
            try:
                work = call(self._lane(name).backend)
            except RuntimeError as error:
                raise self._lost(what(), error) from error
            work.get_future().then(lambda _: times.append(time.perf_counter()))
            works.append((work, name, number))

        def wait() -> T:
            for i, (work, name, number) in enumerate(works):
                self._await(work, name, number, what())
                if each:
                    each(i)
            return result()

        return Pending(
            wait, lambda: all(work.is_completed() for work, _, _ in works), lambda: max(times, default=0.0)
        )

    def _await(self, work: dist.Work, lane: str, number: int, what: str) -> None:
        """Wait in short slices, looking up between them whether somebody we wait for has left."""
        deadline = time.perf_counter() + self._timeout
        while True:
            try:
                work.wait(timedelta(seconds=_GLANCE))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._lost(what, error) from error
            try:
                self._look_for_leavers(lane, number, what)
            except dist.DistError:
                deadline = min(deadline, time.perf_counter() + _STORE_GONE)
            if time.perf_counter() > deadline:
                me = self._names[self.rank]
                raise PeerLost(f"Waiting for {what}: rank {me} heard nothing for {self._timeout:g} s.")

    def _look_for_leavers(self, lane: str, number: int, what: str) -> None:
        if not self._store.check([f"{self._key}/left"]):
            return
        for rank in range(self.size):
            if rank != self.rank and self._store.check([f"{self._key}/left/{rank}"]):
                note = json.loads(self._store.get(f"{self._key}/left/{rank}"))
                if number >= note["begun"].get(lane, 0):  # what it sent before it left still arrives
                    raise Farewell(note["text"], note["shared"]).error(self._names[rank], what)

    def _lost(self, what: str, error: Exception) -> PeerLost:
        reason = str(error).splitlines()[0].rsplit("] ", 1)[-1]
        me = self._names[self.rank]
        return PeerLost(f"Waiting for {what}: rank {me} lost a connection ({reason})")


def _sum(tensor: Tensor, backend: Any) -> Any:
    return backend.allreduce([tensor])


_Call = tuple[Tensor, Callable[[Any], dist.Work]]


class _Lane:
    """Connections of their own, and how many messages were begun on them."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.begun = 0


def _backend(kind: str, store: Store, rank: int, size: int, timeout: float) -> Any:
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"The process group runs on {kind}: Offbeat speaks gloo and nccl.")
