"""Work in the background of the training loop: task queues, and sidecars that listen to other workers."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.base.errors import PeerLost
from offbeat.comm.communicator import Communicator, Pending, arrived
from offbeat.comm.store import STORE_GONE, STORE_SILENT, Silent

if TYPE_CHECKING:
    from offbeat.comm.monitor import PeerMonitor

T = TypeVar("T")

_LISTENER = "offbeat-listen"
_LONG = timedelta(days=365)  # a listener never gives up
_WAKE = 2.0  # seconds that the store has to accept a number
_LOOK = 1.0  # seconds between two looks in the store while one worker waits for another
_END = 10.0  # seconds to wait for a thread to end; each checks four times a second


class TaskQueue:
    """Runs jobs in the order given; this one runs each at once. After a failure, later jobs fail likewise.

    Jobs use a communicator of their own, such as a `duplicate`, so that messages have the same order on all
    ranks.
    """

    _error: BaseException | None = None

    def give(self, job: Callable[[], T]) -> Pending[T]:
        """Add a job, and return its result as a message."""
        return arrived(self._do(job))

    def close(self) -> None:
        """Finish all jobs and end."""

    def abandon(self) -> None:
        """End without starting the remaining jobs."""

    def _do(self, job: Callable[[], T]) -> T:
        if self._error is not None:
            raise self._error
        try:
            return job()
        except BaseException as error:
            self._error = error
            raise


class ThreadQueue(TaskQueue):
    """Runs jobs in its own thread. The interpreter waits for the remaining jobs before it exits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-task_queue")

    def give(self, job: Callable[[], T]) -> Pending[T]:
        future = self._thread.submit(lambda: (self._do(job), time.perf_counter()))
        return Pending(lambda: future.result()[0], future.done, lambda: future.result()[1])

    def close(self) -> None:
        self._thread.shutdown()

    def abandon(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Stopped(Exception):
    """Raised inside a sidecar to end it; never seen outside."""


class Sidecar(ABC):
    """A background thread of a worker, the state that both share, and numbers that other workers announce.

    An error in the sidecar is raised by the worker's next `until` or `check`.
    """

    comm: Communicator  # connections that only the sidecar uses
    _error: BaseException | None = None

    @property
    def heard(self) -> int:
        """The highest number announced so far, here or elsewhere; −1 if none."""
        return max(map(self.heard_from, range(self.comm.size)))

    @abstractmethod
    def heard_from(self, rank: int) -> int:
        """The highest number that a rank has announced to this one; −1 if none."""

    @abstractmethod
    def start(self, work: Callable[[], None]) -> None:
        """Start the thread."""

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock on the shared state. All threads that wait check again after its release."""

    @abstractmethod
    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        """Inside `locked`: release the lock and wait for `ready()`. Return False after a timeout."""

    def await_number(self, rank: int, least: int, what: str, seconds: float) -> int:
        """Inside `locked`: wait for a rank to announce at least this number, and return what it announced.

        While that rank lives, it does so within `seconds`. Raises if a worker has left.
        """
        self.until(lambda: self.heard_from(rank) >= least, what)
        return self.heard_from(rank)

    @abstractmethod
    def announce(self, number: int, to: int | None = None) -> None:
        """Send a number to every worker, or to one. On each worker, only one thread calls this."""

    def check(self) -> None:
        """Raise the sidecar's error, if there is one."""
        if self._error is not None:
            raise self._error

    @abstractmethod
    def stop(self) -> None:
        """End the sidecar, even while it waits. Idempotent."""


class ThreadSidecar(Sidecar):
    """The sidecar of a process: one thread works, another listens. Each rank has a queue in the store.

    No two threads share a connection or a store client. They are daemons, which never keep a process alive.
    """

    def __init__(self, comm: Communicator, monitor: PeerMonitor) -> None:
        self.comm, self._monitor = comm, monitor
        self._store_client, self._timeout = monitor.store_client, monitor.timeout
        self._heard = [-1] * comm.size  # by rank
        self._stopped, self._queues = monitor.stopped, f"{monitor.key}/queue"
        self._shared, self._threads = threading.Condition(), list[threading.Thread]()
        try:
            self._ask(lambda queues: queues.queue_len(str(comm.rank)))
        except (AttributeError, NotImplementedError) as error:
            raise ValueError(
                "The process group's store has no queues, which workers need to call each other to a round: "
                "use torchrun, or init_process_group with tcp:// or env://, and torch 2.8 or newer."
            ) from error

    def start(self, work: Callable[[], None]) -> None:
        for name, target in (("offbeat-work", work), (_LISTENER, self._listen)):
            thread = threading.Thread(target=self._guard, args=(target,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            with self.locked():
                self._error = self._error or error

    def _listen(self) -> None:
        try:
            with self._store_client.lend(shared=False) as client:
                client.set_timeout(_LONG)
                queues = PrefixStore(self._queues, client)
                while not self._stopped.is_set():
                    rank, number = map(int, queues.queue_pop(str(self.comm.rank)).split())
                    with self.locked():
                        self._heard[rank] = max(self._heard[rank], number)
        except dist.DistError as error:
            if not self._stopped.is_set():
                raise PeerLost(f"Rank {self.comm.rank} {STORE_GONE}.") from error

    def _ask(self, call: Callable[[Store], T]) -> T:
        try:
            return self._store_client.ask(lambda store: call(PrefixStore(self._queues, store)), self._timeout)
        except Silent:
            trouble = f"timed out after {self._timeout:g} s, {STORE_SILENT}"
            raise PeerLost(f"Rank {self.comm.rank} {trouble}.") from None
        except dist.DistError as error:
            raise PeerLost(f"Rank {self.comm.rank} {STORE_GONE}.") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._shared:
            yield
            self._shared.notify_all()

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        deadline = inf if seconds is None else time.perf_counter() + seconds
        self._shared.notify_all()
        while not ready() or self._stopped.is_set():
            self.check()
            if self._stopped.is_set():
                raise Stopped
            if (left := deadline - time.perf_counter()) <= 0:
                return False
            self._shared.wait(None if seconds is None else left)
        return True

    def heard_from(self, rank: int) -> int:
        return self._heard[rank]

    def await_number(self, rank: int, least: int, what: str, seconds: float) -> int:
        # A rank that has left pushes nothing into queues: only its note in the store tells.
        wait = self._monitor.expect_number(rank, what, seconds)
        while not self.until(lambda: self._heard[rank] >= least, what, _LOOK):
            wait.check()
        return self._heard[rank]

    def announce(self, number: int, to: int | None = None) -> None:
        self.check()  # raises if the listener has lost the store
        me, everyone = self.comm.rank, range(self.comm.size)
        if to in (None, me):
            self._heard[me] = max(self._heard[me], number)

        def push(queues: Store) -> None:
            for rank in everyone if to is None else [to]:
                if rank != me:
                    queues.queue_push(str(rank), f"{me} {number}")

        self._ask(push)

    def stop(self) -> None:
        self._stopped.set()
        with self.locked():
            pass  # wakes the worker
        woken, me, queues = True, str(self.comm.rank), self._queues
        if any(thread.name == _LISTENER and thread.is_alive() for thread in self._threads):
            try:
                self._store_client.ask(
                    lambda store: PrefixStore(queues, store).queue_push(me, f"{me} -1"), _WAKE
                )
            except Silent:
                woken = False  # the listener waits for a store that does not answer: leave it behind
            except dist.DistError:
                pass  # the listener ends by itself
        for thread in self._threads:
            # The garbage collector may end an abandoned run, in any thread.
            if thread is not threading.current_thread() and (woken or thread.name != _LISTENER):
                thread.join(_END)
