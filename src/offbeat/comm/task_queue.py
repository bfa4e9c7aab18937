"""Work done beside the worker, one job after the other: by a thread, or in a simulation's virtual time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from offbeat.comm.pending import Pending, arrived

T = TypeVar("T")


class TaskQueue(ABC):
    """Does jobs in the order they were given. After one has failed, all later ones fail with its error.

    What a job sends goes through a communicator that nobody else uses, such as a `duplicate`: then messages
    are in the same order on all ranks, whatever the workers themselves send in the meantime.
    """

    def __init__(self) -> None:
        self._trouble: BaseException | None = None

    @abstractmethod
    def give(self, job: Callable[[], T]) -> Pending[T]:
        """A job to do when all before it are done; its result."""

    def close(self) -> None:
        """Do what was given, and end."""
        return None

    def abandon(self) -> None:
        """End; what was given and not begun is not done."""
        return None

    def _do(self, job: Callable[[], T]) -> T:
        if self._trouble is not None:
            raise self._trouble
        try:
            return job()
        except BaseException as error:
            self._trouble = error
            raise


class InlineQueue(TaskQueue):
    """Does every job at once: in a world of one there is nothing to wait for."""

    def give(self, job: Callable[[], T]) -> Pending[T]:
        return arrived(self._do(job))


class ThreadQueue(TaskQueue):
    """Does jobs in a thread of its own. The interpreter waits at its end for the jobs given."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-task_queue")

    def give(self, job: Callable[[], T]) -> Pending[T]:
        def timed() -> tuple[T, float]:
            return self._do(job), time.perf_counter()

        future = self._thread.submit(timed)
        return Pending(lambda: future.result()[0], future.done, lambda: future.result()[1])

    def close(self) -> None:
        self._thread.shutdown()

    def abandon(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class VirtualQueue(TaskQueue):
    """Does jobs when the result of one is wanted, at the virtual time at which they could be done.

    `clock` reads the worker's virtual clock, `move` sets it. While a job is done the clock is that of the
    task_queue, who is where the last job ended or, if it was given later, where the worker was then.
    """

    def __init__(self, clock: Callable[[], float], move: Callable[[float], None]) -> None:
        super().__init__()
        self._clock, self._move = clock, move
        self._now, self.busy = 0.0, False
        self._open: deque[Callable[[], None]] = deque()

    def give(self, job: Callable[[], T]) -> Pending[T]:
        given, done = self._clock(), [0.0]
        result: list[Any] = []

        def act() -> None:
            worker, self.busy = self._clock(), True
            self._move(max(self._now, given))
            try:
                result.append(self._do(job))
            finally:
                self._now = done[0] = self._clock()
                self._move(worker)
                self.busy = False

        def wait() -> T:
            while not result:
                if self._trouble is not None:
                    raise self._trouble
                self._open.popleft()()
            self._move(max(self._clock(), done[0]))
            value: T = result[0]
            return value

        self._open.append(act)
        return Pending(wait, lambda: bool(result) and done[0] <= self._clock(), lambda: done[0])

    def catch_up(self) -> None:
        """The worker stands still: do what was given, as others may wait for it. Trouble is told later."""
        while self._open and self._trouble is None:
            with suppress(BaseException):
                self._open.popleft()()

    def close(self) -> None:
        while self._open and self._trouble is None:
            self._open.popleft()()
