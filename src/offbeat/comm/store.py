"""A client of the process group's store that never blocks a worker, and backends that connect through it."""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

T = TypeVar("T")

_LAST = 1.0  # seconds allowed for the last calls

STORE_GONE = "lost the process group's store: its host, usually rank 0, is gone"
STORE_SILENT = "and the process group's store is silent: its host, usually rank 0, is stopped or cut off"


class Silent(Exception):
    """The store has not answered in time."""


class StoreClient:
    """A client of a store. A daemon thread makes the calls, so that callers choose how long they wait.

    A store whose host is stopped or cut off does not answer. torch then waits forever, despite its timeout.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared, self._idle = [store], list[Store]()
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        served = (store, self._orders)
        thread = threading.Thread(target=_serve, args=served, name="offbeat-store", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._orders, thread)

    def ask(self, call: Callable[[Store], T], seconds: float) -> T:
        """Make the call and return its result. Raises `Silent` when the time is over."""
        try:
            return self.post(call).result(seconds)
        except Late:
            raise Silent from None

    def post(self, call: Callable[[Store], T]) -> Future[T]:
        """Make the call without waiting for its result."""
        answer: Future[T] = Future()
        self._orders.put((call, answer))
        return answer

    @contextmanager
    def lend(self, *, shared: bool) -> Iterator[Store]:
        """Lend a client for long calls. `shared` allows the group's own, which blocks its other users.

        Clients are reused: the store's host may take seconds to look up the name of a new one.
        """
        idle = self._shared if shared else self._idle
        try:
            client = idle.pop()  # another thread may empty the list first
        except IndexError:
            client = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's annotations
        yield client
        idle.append(client)


_Order = tuple[Callable[[Store], Any], "Future[Any]"]
_clients: WeakKeyDictionary[dist.ProcessGroup, StoreClient] = WeakKeyDictionary()


def store_client() -> StoreClient:
    """Return the client of the default process group's store. There is one per process."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _clients:
        _clients[group] = StoreClient(_get_default_store())
    return _clients[group]


def _serve(store: Store, orders: queue.SimpleQueue[_Order | None]) -> None:
    own = _clone(store)  # now: later, torch would try for minutes to connect to a store that is gone
    while (order := orders.get()) is not None:
        own = _clone(store) if own is None else own
        if own is None:
            order[1].set_exception(dist.DistNetworkError(STORE_GONE))
        else:
            _answer(*order, own)
        del order


def _clone(store: Store) -> Store | None:
    """Return another client; None if the host, which may be busy, does not accept it in time."""
    try:
        return store.clone()  # type: ignore[attr-defined, no-any-return]
    except dist.DistError:
        return None


def _end(orders: queue.SimpleQueue[_Order | None], thread: threading.Thread) -> None:
    """End the thread. If the process exits while it is inside torch, the C++ runtime aborts."""
    orders.put(None)
    if thread is not threading.current_thread():
        thread.join(_LAST)


def _answer(call: Callable[..., T], answer: Future[T], *args: Any) -> None:
    try:
        answer.set_result(call(*args))
    except BaseException as error:
        answer.set_exception(error)


def start(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call in a daemon thread, so that one that never returns does not keep the process alive."""
    answer: Future[T] = Future()
    threading.Thread(target=_answer, args=(call, answer), name=name, daemon=True).start()
    return answer


@functools.cache
def _devices(process: int) -> list[Any]:
    """The devices of gloo's connections. Each has a thread that never ends and that forks do not inherit."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    return [dist.ProcessGroupGloo.create_default_device()]


def open_backend(kind: str, store: Store, rank: int, size: int, timeout: float) -> Any:
    """Connect this rank to all others, and return the backend that holds the connections."""
    if kind == "gloo":
        settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        settings._devices, settings._timeout = _devices(os.getpid()), timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(store, rank, size, settings)
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"The process group runs on {kind}: Offbeat supports gloo and nccl.")
