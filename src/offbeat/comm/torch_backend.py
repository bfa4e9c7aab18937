"""Workers that are processes, through torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, get_backend_config

from offbeat.comm.alltoall import Call, Calls, begin_exchange, begin_shift
from offbeat.comm.background import Sidecar, TaskQueue, ThreadQueue
from offbeat.comm.collective import Collective, nbytes
from offbeat.comm.communicator import Communicator, Pending, Worker
from offbeat.comm.connections import connect
from offbeat.comm.lookout import Lookout, Watch
from offbeat.comm.presence import Departure, Track
from offbeat.comm.sidecar_threads import ThreadSidecar
from offbeat.comm.store import bulletin, start

_GLANCE = 0.25  # seconds between two looks at the store while waiting
_GRACE = 5.0  # seconds by which torch gives up after us: we can say who is missing

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class InFlight:
    """A message and the time it was first seen to have arrived.

    There are no callbacks: gloo's threads may outlive the interpreter and must not run Python.
    """

    def __init__(self, work: dist.Work, connection: str, number: int) -> None:
        self.work, self.connection, self.number = work, connection, number
        self.arrived = 0.0

    def look(self) -> bool:
        """Whether it has arrived."""
        if not self.arrived and self.work.is_completed():
            self.arrived = time.perf_counter()
        return self.arrived > 0


class Connection:
    """One backend, the number of messages begun on it, and those that may still be in the air."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name, self.backend, self.begun = name, backend, 0
        self._air: list[InFlight] = []

    def begin(self, call: Callable[[Any], dist.Work]) -> InFlight:
        self.look()
        self.begun += 1
        message = InFlight(call(self.backend), self.name, self.begun - 1)
        self._air.append(message)
        return message

    def look(self) -> None:
        """Note the arrivals since the last look."""
        self._air = [message for message in self._air if not message.look()]

    def __del__(self, keep: Callable[[Any], None] = ctypes.pythonapi.Py_IncRef) -> None:
        # gloo's destructor holds the interpreter until all messages have arrived. After a failure they never
        # do, so such a backend is kept as long as the process lives.
        if not all(message.look() for message in self._air):
            keep(ctypes.py_object(self.backend))


class Torch(Communicator, Worker):
    """The ranks of a torch process group, on connections of Offbeat's own.

    The caller's collectives never interleave with ours. `timeout` is the longest wait for one message, in
    seconds. A rank that leaves or dies is noticed within about a second.
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
        self._names = list(range(len(ranks)))  # what errors call the ranks
        self._ranks, self._backends, self._timeout = ranks, backends, timeout
        self._stopped, self._bulletin = threading.Event(), bulletin()
        # The caller's own connections tell whether a rank dies before ours are there.
        theirs = [group._get_backend(torch.device("cpu"))] if backends.get("cpu") == "gloo" else []
        key = f"offbeat/{group.group_name}/{ranks}/{_made[group]}"
        self._join(key, ("control", "cpu"), gloo=theirs)

    def _join(
        self,
        key: str,
        connections: tuple[str, ...],
        above: Lookout | None = None,
        gloo: Sequence[Any] = (),
    ) -> Torch:
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._key, self._first_connections = key, connections
        self._lookout = Lookout(key, self._names, self.rank, self._bulletin, above)
        self._lookout.gloo = list(gloo)
        self._connections: dict[str, Connection] = {}
        self._children: dict[tuple[int, ...], Torch] = {}
        self._beside: WeakSet[Torch] = WeakSet()  # duplicates and sidecars
        self._made_beside = 0
        self._left = False
        # gloo connects all ranks with all, and hangs if one is missing: connect now, while everyone is here.
        for connection in connections:
            self._connect(connection)
        return self

    def _connect(self, name: str) -> Connection:
        """Connect to all others, for control messages or for tensors on one kind of device.

        `new_group` does not work here: it numbers groups per process, and hangs where some ranks have made
        others. torch blocks while it connects, so another thread does it.
        """
        kind = "gloo" if name in ("control", "cpu") else self._backends[name]
        what = "all ranks to connect"

        def make() -> Any:
            with self._bulletin.lend(shared=True) as client:
                store = PrefixStore(f"{self._key}/{name}", client)
                return connect(kind, store, self.rank, self.size, self._timeout + _GRACE)

        self._lookout.arrive(name, 0)
        connecting = start(make, "offbeat-connect")
        watch = Watch(self._lookout, name, -1, what, self._timeout, time.perf_counter())
        while not futures.wait([connecting], _GLANCE).done:
            watch.look(self._stopped)
        try:
            self._connections[name] = Connection(name, connecting.result())
        except RuntimeError as error:
            raise self._lookout.lost(what, error) from error
        self._lookout.gloo = [
            self._connections[name].backend for name in ("control", "cpu") if name in self._connections
        ]
        return self._connections[name]

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        calls, result = _BEGIN[kind.name](self, tensors, src)
        sent: list[InFlight] = []

        def what() -> str:
            return "word from all" if control else kind.phrase.format(bytes=nbytes(tensors), src=src)

        def wait() -> list[Tensor]:
            for message in sent:
                self._await(message, what)
                message.look()
            return result

        for tensor, call in calls:
            name = "control" if control else tensor.device.type
            connection = self._connections.get(name) or self._connect(name)
            try:
                sent.append(connection.begin(call))
            except RuntimeError as error:
                raise self._lookout.lost(what(), error) from error
        return Pending(
            wait,
            lambda: all(map(InFlight.look, sent)),
            lambda: max([message.arrived for message in sent], default=0.0),
        )

    def _await(self, message: InFlight, what: Callable[[], str]) -> None:
        """Wait in short slices, and check between them whether the message can still come."""
        work, began, watch = message.work, time.perf_counter(), None
        while True:
            over = work.is_completed()
            try:
                work.wait(timedelta(seconds=_GLANCE))
                return
            except RuntimeError as error:
                # One that ends just as the wait does is waited for again: its own error counts.
                if over:
                    raise self._lookout.lost(what(), error) from error
                if work.is_completed():
                    continue
            if watch is None:
                number, name = message.number, message.connection
                watch = Watch(self._lookout, name, number, what(), self._timeout, began)
                if name in self._connections:
                    self._lookout.arrive(name, self._connections[name].begun)
            watch.look(self._stopped)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = tuple(next(group for group in groups if self.rank in group))
        if mine not in self._children:
            self._children[mine] = self._like(mine)._join(
                f"{self._key}/{mine}", self._first_connections, self._lookout
            )
        return self._children[mine]

    @property
    def worker(self) -> Worker:
        return self

    def computed(self, step: int) -> None:
        """Note what arrived during the computation: times of arrival are as fine as steps."""
        for connection in self._connections.values():
            connection.look()
        for child in self._children.values():
            child.computed(step)

    def follow(self, track: Track) -> None:
        self._lookout.follow(track)

    def leave(self, departure: Departure) -> None:
        if not self._left:
            self._lookout.leave(departure, self._count_begun())

    def _count_begun(self) -> dict[str, dict[str, int]]:
        """The messages begun here and on all communicators made from this one, all of which are left."""
        self._left = True
        begun = {self._key: {name: connection.begun for name, connection in self._connections.items()}}
        for other in (*self._children.values(), *self._beside):
            begun.update(other._count_begun())
        return begun

    def duplicate(self) -> Communicator:
        return self._join_beside("duplicate", self._like(range(self.size)), self._first_connections)

    def task_queue(self) -> TaskQueue:
        return ThreadQueue()

    def sidecar(self) -> Sidecar:
        other = self._like(range(self.size))
        other._stopped = threading.Event()
        # Only the groups it is split into have connections.
        aside = self._join_beside("sidecar", other, ())
        aside._first_connections = self._first_connections
        return ThreadSidecar(aside, self._bulletin, f"{aside._key}/queue", aside._stopped, self._timeout)

    def _join_beside(self, kind: str, other: Torch, connections: tuple[str, ...]) -> Torch:
        self._made_beside += 1
        self._beside.add(other)
        return other._join(f"{self._key}/{kind} {self._made_beside}", connections, self._lookout)

    def _like(self, members: Iterable[int]) -> Torch:
        """Another communicator, of some of these ranks, not yet connected."""
        other, members = Torch.__new__(Torch), list(members)
        other._ranks = [self._ranks[rank] for rank in members]
        other._names = [self._names[rank] for rank in members]
        other._backends, other._timeout = self._backends, self._timeout
        other._stopped, other._bulletin = self._stopped, self._bulletin
        return other


def _begin_sum(comm: Torch, tensors: Sequence[Tensor], src: int) -> Calls:
    def call(tensor: Tensor) -> Call:
        return tensor, lambda pg: pg.allreduce([tensor])

    return [call(tensor) for tensor in tensors], list(tensors)


def _begin_gather(comm: Torch, tensors: Sequence[Tensor], src: int) -> Calls:
    given = tensors[0].contiguous().view(-1)
    got = given.new_empty(comm.size * given.numel())
    return [(given, lambda pg: pg._allgather_base(got, given))], list(got.view(comm.size, *tensors[0].shape))


def _begin_broadcast(comm: Torch, tensors: Sequence[Tensor], src: int) -> Calls:
    def call(tensor: Tensor) -> Call:
        return tensor, lambda pg: pg.broadcast(tensor, root=src)

    return [call(tensor) for tensor in tensors], list(tensors)


# How each collective begins: the calls, each with a tensor on its device, and the tensors they fill.
_BEGIN = {
    "mean": _begin_sum,
    "gather": _begin_gather,
    "exchange": begin_exchange,
    "broadcast": _begin_broadcast,
    "shift": begin_shift,
}
