"""Workers that are processes, through torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, get_backend_config

from offbeat.comm.background import Sidecar, TaskQueue, ThreadQueue, ThreadSidecar
from offbeat.comm.collective import LONG, Collective, nbytes
from offbeat.comm.communicator import Communicator, Pending, PendingList, Tensors, Worker
from offbeat.comm.connection import Connection
from offbeat.comm.monitor import PeerMonitor, Wait
from offbeat.comm.presence import Departure, Track
from offbeat.comm.store import open_backend, start, store_client

_GLANCE = 0.25  # seconds between two checks of the store while waiting
_GRACE = 5.0  # seconds by which torch's timeout is longer than ours, which can say who is missing
_FIRST = ("control", "cpu")  # the connections that every communicator begins with
_PIECES, _PIECE = 4, 2**19  # most pieces of a chunk, as each costs a latency; fewest bytes of a piece

BackendCall = tuple[str, tuple[Any, ...]]  # a method of a backend and its arguments, a tensor first
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Message(Pending[list[Tensor]]):
    """A collective in flight. It has no callbacks: gloo's threads may outlive the interpreter."""

    def __init__(
        self, monitor: PeerMonitor, text: str, tensors: Tensors, src: int, result: list[Tensor]
    ) -> None:
        self._monitor, self._text, self._tensors, self._src = monitor, text, tensors, src
        self._result, self._seen = result, 0.0
        self.calls: list[tuple[Connection, int, dist.Work]] = []

    def describe(self) -> str:
        return self._text.format(bytes=nbytes(self._tensors), src=self._src)

    def wait(self) -> list[Tensor]:
        """Wait in short slices, and check between them whether the message can still arrive."""
        for connection, number, work in self.calls:
            wait = None
            while True:
                over = work.is_completed()
                try:
                    work.wait(timedelta(seconds=_GLANCE))
                    break
                except RuntimeError as error:
                    # If it ended during the wait, wait again to get its own error.
                    if over:
                        raise self._monitor.explain_loss(self.describe(), error) from error
                    if work.is_completed():
                        continue
                if wait is None:
                    wait = Wait(self._monitor, connection.name, number, self.describe())
                    self._monitor.arrive(connection.name, connection.begun)
                wait.check()
        self.done()
        return self._result

    def done(self) -> bool:
        if not self._seen:
            for _, _, work in self.calls:
                if not work.is_completed():
                    return False
            self._seen = time.perf_counter()
        return True

    def arrived(self) -> float:
        self.done()
        return self._seen if self.calls else 0.0


class Torch(Communicator, Worker):
    """The ranks of a torch process group, on connections of Offbeat's own that the caller never uses.

    `timeout` is the longest wait for one message, in seconds. A rank that leaves or dies is noticed within
    about a second.
    """

    ranks: tuple[int, ...] = ()  # in the default group; empty if it was made from another communicator

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> None:
        if not timeout > 0:
            raise ValueError(f"Torch(timeout={timeout}): timeout must be a positive number of seconds.")
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise RuntimeError("Torch(): there is no process group: call init_process_group first.")
        # All members make their communicators in the same order, so the number is the same everywhere.
        _counts[group] = _counts.get(group, 0) + 1
        ranks = dist.get_process_group_ranks(group)
        self.ranks = tuple(ranks)
        key = f"offbeat/{group.group_name}/{ranks}/{_counts[group]}"
        monitor = PeerMonitor(key, range(len(ranks)), ranks.index(dist.get_rank()), store_client(), timeout)
        self._backends = dict(item.split(":") for item in str(get_backend_config(group)).split(","))
        if self._backends.get("cpu") == "gloo":  # shows which ranks die before ours are connected
            monitor.gloo = [group._get_backend(torch.device("cpu"))]
        self._join(monitor, _FIRST)

    @classmethod
    def among(cls, monitor: PeerMonitor) -> Torch:
        """Connect workers that have no process group but a common store."""
        (made := cls.__new__(cls))._backends = {"cpu": "gloo", "cuda": "nccl"}
        made._join(monitor, _FIRST)
        return made

    def _join(self, monitor: PeerMonitor, connections: Sequence[str]) -> None:
        self._monitor, self.rank, self.size = monitor, monitor.names.index(monitor.name), len(monitor.names)
        self._connections: dict[str, Connection] = {}
        self._children: dict[tuple[int, ...], Torch] = {}
        self._beside: WeakSet[Torch] = WeakSet()  # duplicates and sidecars
        self._in_flight: WeakSet[Message] = WeakSet()  # messages whose time of arrival is not known yet
        self._made_beside, self.left = 0, False  # `left`: this rank has told the others that it failed
        for connection in connections:  # now, while all are here: gloo hangs if a rank is missing
            self._connect(connection)

    def _make(self, name: str, members: Sequence[int], connections: Sequence[str] = _FIRST) -> Torch:
        """Return another communicator, of some of these ranks."""
        above, other = self._monitor, Torch.__new__(Torch)
        key, names = f"{above.key}/{name}", [above.names[rank] for rank in members]
        monitor = PeerMonitor(key, names, above.name, above.store_client, above.timeout, above, above.stopped)
        other._backends = self._backends
        other._join(monitor, connections)
        return other

    def _connect(self, name: str) -> Connection:
        """Connect to all other ranks, for control messages or tensors of one device.

        A thread does it, because torch blocks. `new_group` would hang if ranks had made different groups.
        """
        monitor, kind = self._monitor, "gloo" if name in _FIRST else self._backends[name]

        def make() -> Any:
            with monitor.store_client.lend(shared=True) as client:
                store = PrefixStore(f"{monitor.key}/{name}", client)
                return open_backend(kind, store, self.rank, self.size, monitor.timeout + _GRACE)

        monitor.arrive(name, 0)
        connecting = start(make, "offbeat-connect")
        wait = Wait(monitor, name, -1, "all ranks to connect")
        while not futures.wait([connecting], _GLANCE).done:
            wait.check()
        try:
            self._connections[name] = Connection(name, connecting.result())
        except RuntimeError as error:
            raise monitor.explain_loss("all ranks to connect", error) from error
        monitor.gloo = [self._connections[name].backend for name in _FIRST if name in self._connections]
        return self._connections[name]

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        calls, result = list[BackendCall](), list(tensors)
        if kind.in_place:
            method, root = ("broadcast", (src,)) if kind.name == "broadcast" else ("allreduce", ())
            for tensor in tensors:
                calls.append((method, (tensor, *root)))
        elif kind.name == "exchange":
            calls, result = _exchange_calls(self.rank, self.size, tensors)
        else:
            given = tensors[0].contiguous().view(-1)
            if kind.name == "shift":
                got = torch.empty_like(given)
                calls = [_pass_call(self.size, given, (self.rank + 1) % self.size, got, self.rank - 1)]
                result = [got.view(tensors[0].shape)]
            else:
                got = given.new_empty(self.size * given.numel())
                calls = [("_allgather_base", (got, given))]
                if given.device.type == "cpu" and got.nbytes < LONG:
                    # gloo gathers along a ring; an all-to-all sends all messages at once.
                    calls = [("alltoall_base", (got, given.repeat(self.size), [], []))]
                result = list(got.view(self.size, *tensors[0].shape))
        phrase = "all ranks to report" if control else kind.phrase
        message = Message(self._monitor, phrase, tensors, src, result)
        for method, arguments in calls:
            name = "control" if control else arguments[0].device.type
            connection = self._connections.get(name) or self._connect(name)
            try:
                work = getattr(connection.backend, method)(*arguments)
            except RuntimeError as error:
                raise self._monitor.explain_loss(message.describe(), error) from error
            message.calls.append((connection, connection.begun, work))
            connection.begun += 1
            while connection.in_flight and connection.in_flight[0].is_completed():
                connection.in_flight.popleft()
            connection.in_flight.append(work)
        self._in_flight.add(message)
        return message

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = tuple(next(group for group in groups if self.rank in group))
        if mine not in self._children:
            self._children[mine] = self._make(str(mine), mine)
        return self._children[mine]

    def computed(self, step: int, share: float = 1.0) -> None:
        """Note which messages arrived during the computation. Times of arrival are as fine as steps."""
        for message in list(self._in_flight):
            if message.done():
                self._in_flight.discard(message)
        for child in self._children.values():
            child.computed(step, share)

    def follow(self, track: Track) -> None:
        self._monitor.follow(track)

    def leave(self, departure: Departure) -> None:
        if not self.left:
            self._monitor.leave(departure, self._count_begun())

    def disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for other in (*self._children.values(), *self._beside):
            other.disconnect()

    def _count_begun(self) -> dict[str, dict[str, int]]:
        """Leave this and all communicators made from it. Return how many messages each has begun."""
        self.left = True
        begun = {self._monitor.key: {name: part.begun for name, part in self._connections.items()}}
        for other in (*self._children.values(), *self._beside):
            begun.update(other._count_begun())
        return begun

    def duplicate(self) -> Communicator:
        return self._make_beside("duplicate", _FIRST)

    def task_queue(self) -> TaskQueue:
        return ThreadQueue()

    def sidecar(self) -> Sidecar:
        aside = self._make_beside("sidecar", ())  # only the groups that it is split into are connected
        aside._monitor.stopped = threading.Event()
        return ThreadSidecar(aside, aside._monitor)

    def _make_beside(self, kind: str, connections: Sequence[str]) -> Torch:
        self._made_beside += 1
        other = self._make(f"{kind} {self._made_beside}", range(self.size), connections)
        self._beside.add(other)
        return other


def _exchange_calls(rank: int, size: int, chunks: Tensors) -> tuple[list[BackendCall], list[Tensor]]:
    """Return the calls of an exchange, and the tensors that they fill. Long chunks go to one rank at a time.

    If all ranks sent to all at once, some links would be idle before others. gloo works on two calls at a
    time, in order, so the next piece uses the link while one ends.
    """
    given = _join(chunks)
    got = torch.empty_like(given)
    result = list(got.view(size, *chunks[0].shape))
    if given.device.type != "cpu" or given.nbytes < LONG:
        return [("alltoall_base", (got, given, [], []))], result
    ours, theirs = (flat.view(torch.uint8).view(size, -1) for flat in (given, got))
    theirs[rank] = ours[rank]
    piece, calls = max(_PIECE, -(-ours.shape[1] // _PIECES)), []
    for ahead in range(1, size):
        to, by = (rank + ahead) % size, rank - ahead
        for out, room in zip(torch.split(ours[to], piece), torch.split(theirs[by], piece), strict=True):
            calls.append(_pass_call(size, out, to, room, by))
    return calls, result


def _pass_call(size: int, given: Tensor, to: int, got: Tensor, by: int) -> BackendCall:
    """Return a call that sends to one rank and receives as much from another."""
    ours, theirs = [0] * size, [0] * size
    ours[to], theirs[by] = len(given), len(got)
    return "alltoall_base", (got, given, theirs, ours)


def _join(chunks: Tensors) -> Tensor:
    """Return the chunks as one vector; a view if they already are one."""
    first, size = chunks[0], chunks[0].numel()
    starts = [first.data_ptr() + i * first.nbytes for i in range(len(chunks))]
    in_place = starts == [c.data_ptr() for c in chunks] and False not in [c.is_contiguous() for c in chunks]
    memory = [c.untyped_storage().data_ptr() for c in chunks]
    if in_place and size and memory == memory[:1] * len(chunks):
        return first.as_strided((len(chunks) * size,), (1,))
    return torch.cat([chunk.reshape(-1) for chunk in chunks])
