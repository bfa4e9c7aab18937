"""The time that a worker waits for messages, and a clock that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        """A queue whose results count as waited for."""
        queue = self.comm.worker.task_queue()
        give = queue.give

        def watch(job: Callable[[], T]) -> Pending[T]:
            return self.watch(give(job))

        queue.give = watch  # type: ignore[method-assign]
        return queue

    def sidecar(self) -> Sidecar:
        """A sidecar whose `until` counts as waiting."""
        sidecar = self.comm.worker.sidecar()
        until = sidecar.until

        def watch(ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
            with self.waiting():
                return until(ready, what, seconds)

        sidecar.until = watch  # type: ignore[method-assign]
        return sidecar


class Stopwatch:
    """The seconds of a run, without those in which the clock was stopped."""

    def __init__(self, now: Callable[[], float], elapsed: float = 0.0) -> None:
        self._now, self._elapsed, self._since = now, elapsed, now()
        self._running = True

    def read(self) -> float:
        return self._elapsed + (self._now() - self._since if self._running else 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside."""
        self._elapsed, self._running = self.read(), False
        yield
        self._since, self._running = self._now(), True

    def put(self, seconds: float) -> None:
        self._elapsed = seconds
