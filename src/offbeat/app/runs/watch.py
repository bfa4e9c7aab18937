"""The time that a worker waits for messages, and a clock that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from torch import Tensor

from offbeat.comm.background import Sidecar, TaskQueue
from offbeat.comm.collective import Collective
from offbeat.comm.communicator import Communicator, Pending, Wrapped

T = TypeVar("T")


class Watched(Wrapped):
    """Another communicator; `waited` adds up the seconds that the creating thread waits for messages."""

    def __init__(self, comm: Communicator, root: Watched | None = None) -> None:
        super().__init__(comm)
        self._root = root or self
        self._owner = threading.get_ident()
        self.waited, self._inside = 0.0, False

    def wrap(self, comm: Communicator) -> Communicator:
        return Watched(comm, self._root)

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        return self.watch(self.comm.run(kind, tensors, src=src, control=control))

    def watch(self, message: Pending[T]) -> Pending[T]:
        """The message, with the time of its `wait` counted."""

        def wait() -> T:
            with self.waiting():
                return message.wait()

        return Pending(wait, message.done, message.arrived)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside, unless it is a background thread's or is counted already."""
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

    def task_queue(self) -> TaskQueue:
        return _WatchedQueue(self.comm.worker.task_queue(), self)

    def sidecar(self) -> Sidecar:
        return _WatchedSidecar(self.comm.worker.sidecar(), self)


class _WatchedQueue(TaskQueue):
    """A task queue; waiting for its results counts as waiting."""

    def __init__(self, task_queue: TaskQueue, watched: Watched) -> None:
        super().__init__()
        self._task_queue, self._watched = task_queue, watched

    def give(self, job: Callable[[], T]) -> Pending[T]:
        return self._watched.watch(self._task_queue.give(job))

    def close(self) -> None:
        self._task_queue.close()

    def abandon(self) -> None:
        self._task_queue.abandon()


class _WatchedSidecar(Sidecar):
    """A sidecar; waiting for it counts as waiting."""

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
    """The seconds of a run, without those in which the clock was stopped."""

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
