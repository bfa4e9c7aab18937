"""Workers that are processes, through torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, get_backend_config

from offbeat.base.errors import OffbeatError, PeerLost
from offbeat.comm.communicator import WORDS, Communicator, words
from offbeat.comm.connections import Connection, connected
from offbeat.comm.departure import Departure
from offbeat.comm.lookout import STORE_GONE, STORE_SILENT, Lookout, listed
from offbeat.comm.metered import nbytes
from offbeat.comm.pending import Pending
from offbeat.comm.place import Track
from offbeat.comm.sidecar import Sidecar, Stopped
from offbeat.comm.sidecar_threads import ThreadSidecar
from offbeat.comm.store import Silent, bulletin, start

T = TypeVar("T")

_GLANCE = 0.25  # seconds between two looks at who has left
_STORE_GONE = 3.0  # seconds to wait on after the store, which rank 0 may host, has vanished
_LATER = 5.0  # seconds by which torch gives up after us: we can say who is missing
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
        self._stopped, self._bulletin = threading.Event(), bulletin()
        self._join(f"offbeat/{group.group_name}/{ranks}/{_made[group]}", ("control", "cpu"))

    def _join(self, key: str, connections: tuple[str, ...], above: Lookout | None = None) -> Torch:
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._key, self._first_connections = key, connections
        self._lookout = Lookout(key, self._names, self.rank, self._bulletin, above)
        self._connections: dict[str, Connection] = {}
        self._children: dict[tuple[int, ...], Torch] = {}
        self._beside: WeakSet[Torch] = WeakSet()  # duplicates and sidecars
        self._made_beside = 0
        self._left = False
        # gloo connects all with all, and hangs if one is missing: now, while everybody is here.
        for connection in connections:
            self._connection(connection)
        return self

    def _connection(self, name: str) -> Connection:
        """The connections for control messages, or for tensors on a kind of device.

        `new_group` is of no use: it numbers groups per process, and hangs where some ranks have made others.
        """
        if name not in self._connections:
            self._connections[name] = Connection(self._connected(name))
        return self._connections[name]

    def _connected(self, connection: str) -> Any:
        """Connections to all others. torch waits for them without looking up: a thread of its own does."""
        kind = "gloo" if connection in ("control", "cpu") else self._backends[connection]
        what = "everybody to connect"

        def connect() -> Any:
            with self._bulletin.lend(shared=True) as client:
                store = PrefixStore(f"{self._key}/{connection}", client)
                return connected(kind, store, self.rank, self.size, self._timeout + _LATER)

        self._lookout.arrive(connection, 0)
        connecting, wait = start(connect, "offbeat-connect"), _Wait(self, connection, -1, what)
        while not futures.wait([connecting], _GLANCE).done:
            wait.look()
        try:
            return connecting.result()
        except dist.DistNetworkError as error:
            raise PeerLost(f"Waiting for {what}: rank {self._lookout.name} {STORE_GONE}.") from error
        except RuntimeError as error:
            raise self._lookout.lost(what, error, []) from error

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
            calls, lambda: [part.tolist() for part in parts], lambda: "word from all", connection="control"
        )

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = tuple(next(group for group in groups if self.rank in group))
        if mine not in self._children:
            self._children[mine] = self._like(mine)._join(
                f"{self._key}/{mine}", self._first_connections, self._lookout
            )
        return self._children[mine]

    def duplicate(self) -> Communicator:
        return self._aside("duplicate", self._like(range(self.size)), self._first_connections)

    def sidecar(self) -> Sidecar:
        other = self._like(range(self.size))
        other._stopped = threading.Event()
        # It speaks to the groups it is split into, and to nobody else.
        aside = self._aside("sidecar", other, ())
        aside._first_connections = self._first_connections
        return ThreadSidecar(aside, self._bulletin, f"{aside._key}/queue", aside._stopped, self._timeout)

    def _aside(self, kind: str, other: Torch, connections: tuple[str, ...]) -> Torch:
        self._made_beside += 1
        self._beside.add(other)
        return other._join(f"{self._key}/{kind} {self._made_beside}", connections, self._lookout)

    def _like(self, members: Iterable[int]) -> Torch:
        """Another communicator, of some of these ranks, that has yet to connect to them."""
        other, members = Torch.__new__(Torch), list(members)
        other._ranks = [self._ranks[rank] for rank in members]
        other._names = [self._names[rank] for rank in members]
        other._backends, other._timeout = self._backends, self._timeout
        other._stopped, other._bulletin = self._stopped, self._bulletin
        return other

    def follow(self, track: Track) -> None:
        self._lookout.follow(track)

    def leave(self, departure: Departure) -> None:
        if not self._left:
            self._lookout.leave(departure, self._begun())

    def _begun(self) -> dict[str, dict[str, int]]:
        """How many messages were begun here and on all communicators made from this one, which is left."""
        self._left = True
        begun = {self._key: {name: connection.begun for name, connection in self._connections.items()}}
        for other in (*self._children.values(), *self._beside):
            begun.update(other._begun())
        return begun

    def computed(self, step: int) -> None:
        """See what arrived behind the computation: times of arrival are as fine as steps are."""
        for connection in self._connections.values():
            connection.look()
        for child in self._children.values():
            child.computed(step)

    def _send(
        self,
        calls: Iterable[_Call],
        result: Callable[[], T],
        what: Callable[[], str],
        *,
        connection: str | None = None,
    ) -> Pending[T]:
        """Start the calls; once all have arrived, the result."""
        sent = []
        for tensor, call in calls:
            name = connection or tensor.device.type
            number = self._connection(name).begun
            try:
                sent.append((self._connection(name).begin(call), name, number))
            except OffbeatError:
                raise
            except RuntimeError as error:
                raise self._lookout.lost(what(), error, self._gloo) from error

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

    def _await(self, work: dist.Work, connection: str, number: int, what: str) -> None:
        """Wait in short slices, looking up between them whether the message can still come."""
        wait = _Wait(self, connection, number, what)
        while True:
            over = work.is_completed()
            try:
                work.wait(timedelta(seconds=_GLANCE))
                return
            except RuntimeError as error:
                # One that ends just as the wait does is looked at again: its own answer counts.
                if over:
                    raise self._lookout.lost(what, error, self._gloo) from error
                if work.is_completed():
                    continue
            wait.look()

    @property
    def _gloo(self) -> list[Any]:
        """The connections that tell who is there."""
        return [self._connections[name].backend for name in ("control", "cpu") if name in self._connections]


class _Wait:
    """One wait for a message, or for everybody to connect: when it is in vain it ends."""

    def __init__(self, comm: Torch, connection: str, number: int, what: str) -> None:
        self._comm, self._connection, self._number, self._what = comm, connection, number, what
        self._deadline, self._trouble = time.perf_counter() + comm._timeout, ""
        self._arrived = False

    def look(self) -> None:
        comm, lookout = self._comm, self._comm._lookout
        if comm._stopped.is_set():
            raise Stopped
        if not self._arrived and self._connection in comm._connections:
            lookout.arrive(self._connection, comm._connections[self._connection].begun)
            self._arrived = True
        try:
            self._trouble = ""
            lookout.look(self._connection, self._number, self._what)
        except Silent:
            self._trouble = STORE_SILENT
        except dist.DistError as error:
            if lookout.closed(comm._gloo):
                raise lookout.lost(self._what, error, comm._gloo) from error
            self._trouble = STORE_GONE
            self._deadline = min(self._deadline, time.perf_counter() + _STORE_GONE)
        if time.perf_counter() > self._deadline:
            raise PeerLost(f"Waiting for {self._what}: rank {lookout.name} {self._why()}.")

    def _why(self) -> str:
        if self._trouble == STORE_GONE:
            return STORE_GONE
        silence = f"heard nothing for {self._comm._timeout:g} s"
        if self._trouble:
            return f"{silence}, {self._trouble}"
        try:
            absent = self._comm._lookout.absent(self._connection, self._number)
        except (Silent, dist.DistError):
            return silence
        if not absent:
            return silence
        return f"{silence}: {listed(absent)} {'has' if len(absent) == 1 else 'have'} not come"


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
