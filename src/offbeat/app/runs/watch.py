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
from offbeat.comm.sidecar import Companion
from offbeat.comm.task_queue import Courier

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
        """The time inside counts, unless a courier or companion spends it, or it counts already."""
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

    def twin(self) -> Communicator:
        return Watched(self.comm.twin(), self._root)

    def courier(self) -> Courier:
        return _WatchedCourier(self.comm.courier(), self)

    def companion(self) -> Companion:
        return _WatchedCompanion(self.comm.companion(), self)


class _WatchedCourier(Courier):
    """Waiting for a courier is waiting, too."""

    def __init__(self, courier: Courier, watched: Watched) -> None:
        super().__init__()
        self._courier, self._watched = courier, watched

    def give(self, job: Callable[[], T]) -> Pending[T]:
        return self._watched._watched(self._courier.give(job))

    def close(self) -> None:
        self._courier.close()

    def abandon(self) -> None:
        self._courier.abandon()


class _WatchedCompanion(Companion):
    """Waiting for a companion is waiting, too."""

    def __init__(self, companion: Companion, watched: Watched) -> None:
        self._companion, self._watched, self.comm = companion, watched, companion.comm

    @property
    def heard(self) -> int:
        return self._companion.heard

    def start(self, work: Callable[[], None]) -> None:
        self._companion.start(work)

    def locked(self) -> AbstractContextManager[None]:
        return self._companion.locked()

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        with self._watched.waiting():
            return self._companion.until(ready, what, seconds)

    def announce(self, number: int) -> None:
        self._companion.announce(number)

    def check(self) -> None:
        self._companion.check()

    def stop(self) -> None:
        self._companion.stop()


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
