"""The sidecar of a simulated worker: one more actor on the scheduler, with a clock of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat.comm.communicator import Communicator
from offbeat.comm.sidecar import Sidecar, Stopped
from offbeat.simulate.condition import Condition
from offbeat.simulate.scheduler import Path, Scheduler

_ANNOUNCEMENT = 8  # bytes


class VirtualSidecar(Sidecar):
    """Whoever acts on what is shared first lets all catch up who are behind in virtual time.

    So changes happen in the order of time; at the same time a worker acts before any sidecar, which is why
    nobody is late among workers that need no time at all.
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
            self._look_again(self._scheduler.clocks[self._actor])

    @contextmanager
    def locked(self) -> Iterator[None]:
        self._scheduler.catch_up(self._scheduler.current)
        yield
        self._look_again(self._scheduler.clocks[self._scheduler.current])

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        scheduler, me = self._scheduler, self._scheduler.current
        self._look_again(scheduler.clocks[me])
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
        self._look_again(when)

    def _hear(self, rank: int, number: int) -> None:
        heard = self._scheduler.heard
        heard[self._path, rank] = max(heard.get((self._path, rank), -1), number)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped = True
        self._look_again(self._scheduler.clocks[self._rank])

    def _look_again(self, now: float) -> None:
        """Who waits for what has come true can go on from now."""
        for wait in self._scheduler.waiting.values():
            if isinstance(wait, Condition) and wait.since is None and wait.ready():
                wait.since = now
