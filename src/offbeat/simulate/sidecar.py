"""The companion of a simulated worker: one more actor on the stage, with a clock of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat.comm.communicator import Communicator
from offbeat.comm.sidecar import Companion, Stopped
from offbeat.simulate.condition import Until
from offbeat.simulate.scheduler import Path, Stage

_ANNOUNCEMENT = 8  # bytes


class Understudy(Companion):
    """Whoever acts on what is shared first lets all catch up who are behind in virtual time.

    So changes happen in the order of time; at the same time a worker acts before any companion, which is why
    nobody is late among workers that need no time at all.
    """

    def __init__(self, stage: Stage, rank: int, path: Path, connect: Callable[[int], Communicator]) -> None:
        self._stage, self._rank, self._path = stage, rank, path
        self._actor = stage.hire(rank)
        self.comm = connect(self._actor)
        self._stopped = False
        self._error: BaseException | None = None
        stage.on_exit[rank].append(self.stop)

    @property
    def heard(self) -> int:
        return self._stage.heard.get((self._path, self._rank), -1)

    def start(self, work: Callable[[], None]) -> None:
        self._stage.play(self._actor, lambda: self._guarded(work))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
            self._look_again(self._stage.clocks[self._actor])

    @contextmanager
    def locked(self) -> Iterator[None]:
        self._stage.catch_up(self._stage.current)
        yield
        self._look_again(self._stage.clocks[self._stage.current])

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        stage, me = self._stage, self._stage.current
        self._look_again(stage.clocks[me])
        deadline = None if seconds is None else stage.clocks[me] + seconds
        wait = Until(lambda: ready() or self._over, f"rank {self._rank} waits for {what}", deadline)
        if not wait.ready():
            stage.waiting[me] = wait
            stage.catch_up(me)
        if not ready():
            self.check()
        if self._stopped:
            raise Stopped
        if wait.due is None and not ready():
            assert stage.failure is not None
            raise stage.failure
        return ready()

    @property
    def _over(self) -> bool:
        return self._stopped or self._error is not None

    def announce(self, number: int) -> None:
        now = self._stage.clocks[self._stage.current]
        self._hear(self._rank, number)
        for rank in self._path[-1]:
            if rank != self._rank:
                arrival = functools.partial(self._arrive, rank, number)
                self._stage.post(now + self._stage.traffic.network.seconds(_ANNOUNCEMENT), arrival)

    def _arrive(self, rank: int, number: int, when: float) -> None:
        self._hear(rank, number)
        self._look_again(when)

    def _hear(self, rank: int, number: int) -> None:
        heard = self._stage.heard
        heard[self._path, rank] = max(heard.get((self._path, rank), -1), number)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped = True
        self._look_again(self._stage.clocks[self._rank])

    def _look_again(self, now: float) -> None:
        """Who waits for what has come true can go on from now."""
        for wait in self._stage.waiting.values():
            if isinstance(wait, Until) and wait.since is None and wait.ready():
                wait.since = now
