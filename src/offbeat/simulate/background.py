"""Background work of simulated workers, in virtual time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from offbeat.comm.background import Sidecar, Stopped, TaskQueue
from offbeat.comm.communicator import Communicator, Pending
from offbeat.simulate.scheduler import Condition, Path, Scheduler

T = TypeVar("T")

_ANNOUNCEMENT = 8  # bytes


class VirtualQueue(TaskQueue):
    """Runs jobs when a result is needed, at the virtual time at which a thread would have run them.

    During a job, the actor's clock is the queue's: a job starts when the one before it has ended, but not
    before it was given.
    """

    def __init__(self, scheduler: Scheduler, actor: int) -> None:
        super().__init__()
        self._clocks, self._actor = scheduler.clocks, actor
        self._now, self.busy = 0.0, False
        self._open: deque[Callable[[], None]] = deque()
        scheduler.task_queues.setdefault(actor, []).append(self)

    def give(self, job: Callable[[], T]) -> Pending[T]:
        clocks, actor = self._clocks, self._actor
        given, done = clocks[actor], [0.0]
        result: list[Any] = []

        def run() -> None:
            worker, self.busy = clocks[actor], True
            clocks[actor] = max(self._now, given)
            try:
                result.append(self._do(job))
            finally:
                self._now = done[0] = clocks[actor]
                clocks[actor] = worker
                self.busy = False

        def wait() -> T:
            while not result:
                if self._error is not None:
                    raise self._error
                self._open.popleft()()
            clocks[actor] = max(clocks[actor], done[0])
            value: T = result[0]
            return value

        self._open.append(run)
        return Pending(wait, lambda: bool(result) and done[0] <= clocks[actor], lambda: done[0])

    def catch_up(self) -> None:
        """Run the waiting jobs, since other workers may wait for them. Errors are raised later."""
        with suppress(BaseException):
            self.close()

    def close(self) -> None:
        while self._open and self._error is None:
            self._open.popleft()()


class VirtualSidecar(Sidecar):
    """One more actor of the scheduler, with a clock of its own.

    Before an actor touches shared state, all actors behind it in virtual time catch up, so changes happen in
    the order of time. At the same time a worker acts before any sidecar: workers that need no time are never
    late.
    """

    def __init__(
        self, scheduler: Scheduler, comm: Communicator, path: Path, *, rank: int, actor: int
    ) -> None:
        self._scheduler, self.comm, self._path = scheduler, comm, path
        self._rank, self._actor = rank, actor
        self._stopped = False
        self._error: BaseException | None = None
        scheduler.on_exit[rank].append(self.stop)

    @property
    def heard(self) -> int:
        return self._scheduler.heard.get((self._path, self._rank), -1)

    def start(self, work: Callable[[], None]) -> None:
        def guard() -> None:
            try:
                work()
            except Stopped:
                pass
            except BaseException as error:
                self._error = error
                self._scheduler.wake(self._scheduler.clocks[self._actor])

        self._scheduler.play(self._actor, guard)

    @contextmanager
    def locked(self) -> Iterator[None]:
        scheduler = self._scheduler
        scheduler.catch_up(scheduler.current)
        yield
        scheduler.wake(scheduler.clocks[scheduler.current])

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        scheduler, me = self._scheduler, self._scheduler.current
        now = scheduler.clocks[me]
        scheduler.wake(now)
        wait = Condition(
            lambda: ready() or self._stopped or self._error is not None,
            f"rank {self._rank} waits for {what}",
            due=None if seconds is None else now + seconds,
        )
        if not wait.ready():
            scheduler.waiting[me] = wait
            scheduler.catch_up(me)
        if not ready():
            self.check()
        if self._stopped:
            raise Stopped
        if wait.due is None and not ready():
            assert scheduler.failure is not None
            raise scheduler.failure
        return ready()

    def announce(self, number: int) -> None:
        scheduler = self._scheduler
        arrival = scheduler.clocks[scheduler.current] + scheduler.traffic.network.seconds(_ANNOUNCEMENT)
        scheduler.heard[self._path, self._rank] = max(self.heard, number)
        for rank in self._path[-1]:
            if rank != self._rank:
                scheduler.post(arrival, functools.partial(self._deliver, rank, number))

    def _deliver(self, rank: int, number: int, when: float) -> None:
        heard, key = self._scheduler.heard, (self._path, rank)
        heard[key] = max(heard.get(key, -1), number)
        self._scheduler.wake(when)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped = True
        self._scheduler.wake(self._scheduler.clocks[self._rank])
