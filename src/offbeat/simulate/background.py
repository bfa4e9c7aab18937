"""Background work of simulated workers, in virtual time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from offbeat.comm.background import Sidecar, Stopped, TaskQueue
from offbeat.comm.communicator import Communicator, Pending
from offbeat.simulate.scheduler import Path, Scheduler
from offbeat.simulate.waits import Condition

T = TypeVar("T")

_ANNOUNCEMENT = 8  # bytes


class VirtualQueue(TaskQueue):
    """Runs jobs when a result is needed, at the virtual time at which a thread would have run them.

    `clock` reads the worker's virtual clock, `move` sets it. During a job the clock is the queue's: a job
    starts when the one before it has ended, but not before it was given.
    """

    def __init__(self, clock: Callable[[], float], move: Callable[[float], None]) -> None:
        super().__init__()
        self._clock, self._move = clock, move
        self._now, self.busy = 0.0, False
        self._open: deque[Callable[[], None]] = deque()

    def give(self, job: Callable[[], T]) -> Pending[T]:
        given, done = self._clock(), [0.0]
        result: list[Any] = []

        def run() -> None:
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
                if self._error is not None:
                    raise self._error
                self._open.popleft()()
            self._move(max(self._clock(), done[0]))
            value: T = result[0]
            return value

        self._open.append(run)
        return Pending(wait, lambda: bool(result) and done[0] <= self._clock(), lambda: done[0])

    def catch_up(self) -> None:
        """Run the waiting jobs, since other workers may wait for them. Errors are raised later."""
        while self._open and self._error is None:
            with suppress(BaseException):
                self._open.popleft()()

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
        self, scheduler: Scheduler, rank: int, path: Path, connect: Callable[[int], Communicator]
    ) -> None:
        self._scheduler, self._rank, self._path = scheduler, rank, path
        self._actor = scheduler.spawn(rank)
        self.comm = connect(self._actor)
        self._stopped = False
        self._error: BaseException | None = None
        scheduler.on_exit[rank].append(self.stop)

    @property
    def heard(self) -> int:
        return self._scheduler.heard.get((self._path, self._rank), -1)

    def start(self, work: Callable[[], None]) -> None:
        self._scheduler.play(self._actor, lambda: self._guarded(work))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
            self._wake_waiters(self._scheduler.clocks[self._actor])

    @contextmanager
    def locked(self) -> Iterator[None]:
        self._scheduler.catch_up(self._scheduler.current)
        yield
        self._wake_waiters(self._scheduler.clocks[self._scheduler.current])

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        scheduler, me = self._scheduler, self._scheduler.current
        self._wake_waiters(scheduler.clocks[me])
        deadline = None if seconds is None else scheduler.clocks[me] + seconds
        wait = Condition(lambda: ready() or self._over, f"rank {self._rank} waits for {what}", deadline)
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

    @property
    def _over(self) -> bool:
        return self._stopped or self._error is not None

    def announce(self, number: int) -> None:
        now = self._scheduler.clocks[self._scheduler.current]
        self._hear(self._rank, number)
        for rank in self._path[-1]:
            if rank != self._rank:
                arrival = functools.partial(self._arrive, rank, number)
                self._scheduler.post(now + self._scheduler.traffic.network.seconds(_ANNOUNCEMENT), arrival)

    def _arrive(self, rank: int, number: int, when: float) -> None:
        self._hear(rank, number)
        self._wake_waiters(when)

    def _hear(self, rank: int, number: int) -> None:
        heard = self._scheduler.heard
        heard[self._path, rank] = max(heard.get((self._path, rank), -1), number)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped = True
        self._wake_waiters(self._scheduler.clocks[self._rank])

    def _wake_waiters(self, now: float) -> None:
        """Let actors continue from now whose condition has come true."""
        for wait in self._scheduler.waiting.values():
            if isinstance(wait, Condition) and wait.since is None and wait.ready():
                wait.since = now
