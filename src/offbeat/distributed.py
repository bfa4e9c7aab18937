"""Workers that are processes, through torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, get_backend_config

from offbeat.comm import WORDS, Communicator, words
from offbeat.companion import Companion, Stopped
from offbeat.companion_threads import Threads, clone
from offbeat.errors import PeerLost
from offbeat.farewell import Farewell
from offbeat.lanes import Lane, connected
from offbeat.metered import nbytes
from offbeat.pending import Pending

T = TypeVar("T")

_GLANCE = 0.25  # seconds between two looks at who has left
_STORE_GONE = 5.0  # seconds to wait on after the store, which rank 0 may host, has vanished
_LONG = 2**15  # bytes of a chunk from which on chunks go one after the other
_PIECES, _PIECE = 4, 2**19  # of a chunk, at most: each costs the latency of the link; and bytes, at least

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
        self._ranks, self._backends, self._timeout = ranks, backends, timeout
        self._store, self._stopped = _get_default_store(), threading.Event()
        self._join(f"offbeat/{group.group_name}/{ranks}/{_made[group]}", ("control", "cpu"))

    def _join(self, key: str, lanes: tuple[str, ...]) -> Torch:
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._key, self._first_lanes = key, lanes
        self._lanes: dict[str, Lane] = {}
        self._children: dict[tuple[int, ...], Torch] = {}
        self._beside: WeakSet[Torch] = WeakSet()  # twins and companions
        self._made_beside = 0
        self._left = False
        # gloo connects all with all, and hangs if one is missing: now, while everybody is here.
        for lane in lanes:
            self._lane(lane)
        return self

    def _lane(self, name: str) -> Lane:
        """The connections for control messages, or for tensors on a kind of device.

        `new_group` is of no use: it numbers groups per process, and hangs where some ranks have made others.
        """
        if name not in self._lanes:
            kind = "gloo" if name in ("control", "cpu") else self._backends[name]
            store = PrefixStore(f"{self._key}/{name}", self._store)
            try:
                self._lanes[name] = Lane(connected(kind, store, self.rank, self.size, self._timeout))
            except RuntimeError as error:
                raise self._lost("everybody to connect", error) from error
        return self._lanes[name]

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        sent: list[Tensor] = []

        def calls() -> Iterator[_Call]:
            for tensor in tensors:
                sent.append(tensor)
                yield tensor, functools.partial(_sum, tensor)

        return self._send(calls(), lambda: sent, lambda: f"the mean of {nbytes(sent):,} bytes")

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        given = tensor.contiguous().view(-1)
        heard = given.new_empty(self.size * given.numel())
        calls = [(tensor, lambda pg: pg._allgather_base(heard, given))]
        return self._send(
            calls,
            lambda: list(heard.view(self.size, *tensor.shape)),
            lambda: f"a gathering of {nbytes([tensor]):,} bytes",
        )

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        given, shape = _joined(chunks), chunks[0].shape
        heard = torch.empty_like(given)
        if given.device.type == "cpu" and nbytes(chunks[:1]) >= _LONG:
            calls = self._turns(
                given.view(torch.uint8).view(self.size, -1), heard.view(torch.uint8).view(self.size, -1)
            )
        else:
            calls = [(given, lambda pg: pg.alltoall_base(heard, given, [], []))]
        return self._send(
            calls,
            lambda: list(heard.view(self.size, *shape)),
            lambda: f"an exchange of {nbytes(chunks):,} bytes",
        )

    def _turns(self, given: Tensor, heard: Tensor) -> list[_Call]:
        """An exchange in which everyone sends to one and hears from one at a time.

        When all send to all at once several share the way to each, and some links fall idle before others.
        gloo works on two calls at a time, in their order: while one piece ends the next has the link.
        """
        heard[self.rank] = given[self.rank]
        piece = max(_PIECE, -(-given.shape[1] // _PIECES))
        calls: list[_Call] = []
        for ahead in range(1, self.size):
            to, by = (self.rank + ahead) % self.size, self.rank - ahead
            pieces = zip(torch.split(given[to], piece), torch.split(heard[by], piece), strict=True)
            calls += [(given, self._pass(ours, to, theirs, by)) for ours, theirs in pieces]
        return calls

    def _pass(self, given: Tensor, to: int, heard: Tensor, by: int) -> Callable[[Any], dist.Work]:
        """Give one rank something, and take as much from another."""
        ours, theirs = [0] * self.size, [0] * self.size
        ours[to], theirs[by] = len(given), len(heard)
        return lambda pg: pg.alltoall_base(heard, given, theirs, ours)

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        given = tensor.contiguous().view(-1)
        got = torch.empty_like(given)
        calls = [(tensor, self._pass(given, (self.rank + 1) % self.size, got, self.rank - 1))]
        return self._send(
            calls, lambda: got.view(tensor.shape), lambda: f"the rank before's {nbytes([tensor]):,} bytes"
        )

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
            self._children[mine] = self._like(mine)._join(f"{self._key}/{mine}", self._first_lanes)
        return self._children[mine]

    def twin(self) -> Communicator:
        return self._aside("twin", self._like(range(self.size)), self._first_lanes)

    def companion(self) -> Companion:
        other = self._like(range(self.size))
        other._store, other._stopped = clone(self._store), threading.Event()
        # It speaks to the groups it is split into, and to nobody else.
        aside = self._aside("companion", other, ())
        aside._first_lanes = self._first_lanes
        return Threads(aside, PrefixStore(f"{aside._key}/queue", self._store), aside._stopped)

    def _aside(self, kind: str, other: Torch, lanes: tuple[str, ...]) -> Torch:
        self._made_beside += 1
        self._beside.add(other)
        return other._join(f"{self._key}/{kind} {self._made_beside}", lanes)

    def _like(self, members: Iterable[int]) -> Torch:
        """Another communicator, of some of these ranks, that has yet to connect to them."""
        other, members = Torch.__new__(Torch), list(members)
        other._ranks = [self._ranks[rank] for rank in members]
        other._names = [self._names[rank] for rank in members]
        other._backends, other._timeout = self._backends, self._timeout
        other._store, other._stopped = self._store, self._stopped
        return other

    def leave(self, farewell: Farewell) -> None:
        for other in (*self._children.values(), *self._beside):
            other.leave(farewell)
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

    def computed(self, step: int) -> None:
        """See what arrived behind the computation: times of arrival are as fine as steps are."""
        for lane in self._lanes.values():
            lane.look()
        for child in self._children.values():
            child.computed(step)

    def _send(
        self,
        calls: Iterable[_Call],
        result: Callable[[], T],
        what: Callable[[], str],
        *,
        lane: str | None = None,
    ) -> Pending[T]:
        """Start the calls; once all have arrived, the result."""
        sent = []
        for tensor, call in calls:
            name = lane or tensor.device.type
            number = self._lane(name).begun
            try:
                sent.append((self._lane(name).begin(call), name, number))
            except RuntimeError as error:
                raise self._lost(what(), error) from error

        def wait() -> T:
            for message, name, number in sent:
                self._await(message.work, name, number, what())
                message.look()
            return result()

        return Pending(
            wait,
            lambda: all(message.look() for message, _, _ in sent),
            lambda: max((message.arrived for message, _, _ in sent), default=0.0),
        )

    def _await(self, work: dist.Work, lane: str, number: int, what: str) -> None:
        """Wait in short slices, looking up between them whether somebody we wait for has left."""
        deadline, trouble = time.perf_counter() + self._timeout, f"heard nothing for {self._timeout:g} s"
        while True:
            over = work.is_completed()
            try:
                work.wait(timedelta(seconds=_GLANCE))
                return
            except RuntimeError as error:
                # One that ends just as the wait does is looked at again: its own answer counts.
                if over:
                    raise self._lost(what, error) from error
                if work.is_completed():
                    continue
            if self._stopped.is_set():
                raise Stopped
            try:
                self._look_for_leavers(lane, number, what)
            except dist.DistError:
                trouble = "lost the process group's store"
                deadline = min(deadline, time.perf_counter() + _STORE_GONE)
            if time.perf_counter() > deadline:
                raise PeerLost(f"Waiting for {what}: rank {self._names[self.rank]} {trouble}.")

    def _look_for_leavers(self, lane: str, number: int, what: str) -> None:
        if not self._store.check([f"{self._key}/left"]):
            return
        for rank in range(self.size):
            if rank != self.rank and self._store.check([f"{self._key}/left/{rank}"]):
                note = json.loads(self._store.get(f"{self._key}/left/{rank}"))
                # What it sent before it left still arrives, unless a worker on the way is lost.
                if number >= note["begun"].get(lane, 0) or note["shared"] == PeerLost.__name__:
                    raise Farewell(note["text"], note["shared"]).error(self._names[rank], what)

    def _lost(self, what: str, error: Exception) -> PeerLost:
        reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        me = self._names[self.rank]
        return PeerLost(f"Waiting for {what}: rank {me} lost a connection ({reason}).")


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    """The chunks in one vector, which they may already be."""
    first, size = chunks[0], chunks[0].numel()
    in_place = all(
        chunk.is_contiguous() and chunk.data_ptr() == first.data_ptr() + i * nbytes([first])
        for i, chunk in enumerate(chunks)
    )
    same = len({chunk.untyped_storage().data_ptr() for chunk in chunks}) == 1
    if in_place and same and size:
        return first.as_strided((len(chunks) * size,), (1,))
    return torch.cat([chunk.reshape(-1) for chunk in chunks])


def _sum(tensor: Tensor, backend: Any) -> Any:
    return backend.allreduce([tensor])


_Call = tuple[Tensor, Callable[[Any], dist.Work]]
