"""The process group's store, which must not hold up a worker."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

T = TypeVar("T")


class Silent(Exception):
    """The store has not answered in time."""


class Bulletin:
    """The store of a process group, asked by a daemon thread: callers wait only as long as they want.

    A store whose host is stopped or cut off does not answer, and torch then waits without limit, whatever
    the timeout.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared, self._idle = [store], list[Store]()
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(store, self._orders), name="offbeat-store", daemon=True).start()
        weakref.finalize(self, self._orders.put, None)

    def ask(self, call: Callable[[Store], T], seconds: float) -> T:
        """What the call returns. Raises `Silent` after so many seconds, and the call's own errors."""
        try:
            return self.post(call).result(seconds)
        except Late:
            raise Silent from None

    def post(self, call: Callable[[Store], T]) -> Future[T]:
        """The same, without waiting."""
        answer: Future[T] = Future()
        self._orders.put((call, answer))
        return answer

    @contextmanager
    def lend(self, *, shared: bool) -> Iterator[Store]:
        """A client for calls that take long, in a thread that may never come back from them.

        `shared`: it may be the process group's own, which others have to wait for meanwhile. Clients are used
        again: the store's host may take seconds to look up the name of each new one.
        """
        idle = self._shared if shared else self._idle
        try:
            client = idle.pop()
        except IndexError:
            client = _clone(self._store)
        yield client
        idle.append(client)


_Order = tuple[Callable[[Store], Any], "Future[Any]"]

_bulletins: WeakKeyDictionary[dist.ProcessGroup, Bulletin] = WeakKeyDictionary()


def bulletin() -> Bulletin:
    """The one of this process, made with its default process group."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _bulletins:
        _bulletins[group] = Bulletin(_get_default_store())
    return _bulletins[group]


def _clone(store: Store) -> Store:
    """A client of the same store for another thread."""
    copy: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's annotations
    return copy


def _serve(store: Store, orders: queue.SimpleQueue[_Order | None]) -> None:
    # At once: torch tries for minutes to connect to a store that has gone.
    own = _clone(store)
    while (order := orders.get()) is not None:
        call, answer = order
        try:
            answer.set_result(call(own))
        except BaseException as error:
            answer.set_exception(error)
        del order, call, answer


def start(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call in a daemon thread: one that never returns keeps no process alive."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
