"""Work beside the training loop: a queue of jobs, and a second thread that listens to the other workers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from offbeat.comm.communicator import Communicator, Pending, arrived

T = TypeVar("T")


class TaskQueue(ABC):
    """Runs jobs in the order given. After one has failed, all later ones fail with its error.

    Jobs send through a communicator that nobody else uses, such as a `duplicate`. Messages are then in the
    same order on all ranks, whatever the workers themselves send in the meantime.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @abstractmethod
    def give(self, job: Callable[[], T]) -> Pending[T]:
        """Add a job; the message is its result."""

    def close(self) -> None:  # noqa: B027  # a queue without a thread has nothing to end
        """Finish all jobs and end."""

    def abandon(self) -> None:  # noqa: B027
        """End without starting the jobs that still wait."""

    def _do(self, job: Callable[[], T]) -> T:
        if self._error is not None:
            raise self._error
        try:
            return job()
        except BaseException as error:
            self._error = error
            raise


class InlineQueue(TaskQueue):
    """Runs every job at once: in a world of one there is nothing to wait for."""

    def give(self, job: Callable[[], T]) -> Pending[T]:
        return arrived(self._do(job))


class ThreadQueue(TaskQueue):
    """Runs jobs in a thread of its own. The interpreter waits for the remaining jobs before it exits."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-task_queue")

    def give(self, job: Callable[[], T]) -> Pending[T]:
        def run() -> tuple[T, float]:
            return self._do(job), time.perf_counter()

        future = self._thread.submit(run)
        return Pending(lambda: future.result()[0], future.done, lambda: future.result()[1])

    def close(self) -> None:
        self._thread.shutdown()

    def abandon(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Stopped(Exception):
    """Raised inside a sidecar to end it; never seen outside."""


class Sidecar(ABC):
    """A background thread of a worker, the state that the two share, and numbers announced by other workers.

    Real workers use threads, simulated ones take turns in virtual time. The worker's next `until` or `check`
    raises an error of the sidecar.
    """

    comm: Communicator  # connections for the sidecar alone

    @property
    @abstractmethod
    def heard(self) -> int:
        """The highest number announced so far, here or elsewhere; −1 if none."""

    @abstractmethod
    def start(self, work: Callable[[], None]) -> None:
        """Start the thread."""

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock on the shared state. Everyone who waits checks again after its release."""

    @abstractmethod
    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        """Inside `locked`: release the lock and wait for `ready()`. False after so many seconds."""

    @abstractmethod
    def announce(self, number: int) -> None:
        """Send a number to every worker. Called by the worker's own thread."""

    @abstractmethod
    def check(self) -> None:
        """Raise the sidecar's error, if it had one."""

    @abstractmethod
    def stop(self) -> None:
        """End the sidecar, even while it waits. Idempotent."""
