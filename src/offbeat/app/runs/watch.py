"""How long this worker stands still for messages, and a clock that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from torch import Tensor

from offbeat.comm.communicator import Communicator
from offbeat.comm.metered import Wrapped
from offbeat.comm.pending import Pending
from offbeat.comm.sidecar import Sidecar
from offbeat.comm.task_queue import TaskQueue

T = TypeVar("T")


class Watched(Wrapped):
    """Another communicator; `waited` adds up the seconds its maker's thread spent waiting for messages."""

    def __init__(self, comm: Communicator, root: Watched | None = None) -> None:
        super().__init__(comm)
        self._root = root or self
        self._children: dict[int, Watched] = {}
        self._owner = threading.get_ident()
        self.waited, self._inside = 0.0, False

    def _watched(self, message: Pending[T]) -> Pending[T]:
        def wait() -> T:
            with self.waiting():
                return message.wait()

        def advance() -> None:
            with self.waiting():
                message.advance()

        return Pending(wait, message.done, message.arrived, advance if message.answers else None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside counts, unless a task queue or sidecar spends it, or it counts already."""
        root = self._root
        if root._inside or threading.get_ident() != root._owner:
            yield
            return
        start, root._inside = self.comm.now(), True
        try:
            yield
        finally:
            root._inside = False
            root.waited += self.comm.now() - start

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        return self._watched(self.comm.total(tensors))

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        return self._watched(self.comm.gather(tensor))

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        return self._watched(self.comm.exchange(chunks))

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        return self._watched(self.comm.broadcast(tensors, src))

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        return self._watched(self.comm.tell(numbers))

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        return self._watched(self.comm.shift(tensor))

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        part = self.comm.split(groups)
        return self._children.setdefault(id(part), Watched(part, self._root))

    def duplicate(self) -> Communicator:
        return Watched(self.comm.duplicate(), self._root)

    def task_queue(self) -> TaskQueue:
        return _WatchedQueue(self.comm.task_queue(), self)

    def sidecar(self) -> Sidecar:
        return _WatchedSidecar(self.comm.sidecar(), self)


class _WatchedQueue(TaskQueue):
    """Waiting for a task queue is waiting, too."""

    def __init__(self, task_queue: TaskQueue, watched: Watched) -> None:
        super().__init__()
        self._task_queue, self._watched = task_queue, watched

    def give(self, job: Callable[[], T]) -> Pending[T]:
        return self._watched._watched(self._task_queue.give(job))

    def close(self) -> None:
        self._task_queue.close()

    def abandon(self) -> None:
        self._task_queue.abandon()


class _WatchedSidecar(Sidecar):
    """Waiting for a sidecar is waiting, too."""

    def __init__(self, sidecar: Sidecar, watched: Watched) -> None:
        self._sidecar, self._watched, self.comm = sidecar, watched, sidecar.comm

    @property
    def heard(self) -> int:
        return self._sidecar.heard

    def start(self, work: Callable[[], None]) -> None:
        self._sidecar.start(work)

    def locked(self) -> AbstractContextManager[None]:
        return self._sidecar.locked()

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        with self._watched.waiting():
            return self._sidecar.until(ready, what, seconds)

    def announce(self, number: int) -> None:
        self._sidecar.announce(number)

    def check(self) -> None:
        self._sidecar.check()

    def stop(self) -> None:
        self._sidecar.stop()


class Stopwatch:
    """Seconds of a run, without those in which it was stopped."""

    def __init__(self, now: Callable[[], float], elapsed: float = 0.0) -> None:
        self._now, self._elapsed, self._since = now, elapsed, now()
        self._running = True

    def read(self) -> float:
        return self._elapsed + (self._now() - self._since if self._running else 0.0)

    def stop(self) -> None:
        self._elapsed, self._running = self.read(), False

    def put(self, seconds: float) -> None:
        self._elapsed = seconds

    def go_on(self) -> None:
        self._since, self._running = self._now(), True
