"""Calls in which all workers meet between rounds, such as `averaged()`, where workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from offbeat.base.clock import Clock
from offbeat.base.errors import PeerLost, RunFinished
from offbeat.comm.changing import Changing
from offbeat.engine import agreement
from offbeat.engine.exchange import Exchange
from offbeat.engine.report import logger

if TYPE_CHECKING:
    from offbeat.engine.commits import Commits
    from offbeat.engine.synchronizer import Synchronizer

T = TypeVar("T")
_MOST = 1024  # calls after one step
INSIDE = "A process of this worker has lost another worker."
GONE_ON = "The others have gone on without this worker: start it again, and it receives their state."


class Meetings:
    """Makes these calls, and repeats them among those that are left if a worker is lost meanwhile.

    Each call has a place, the same on all workers: the step, and its number among the calls after that step.
    A worker that has passed a call waits at the next one for those that repeat it.
    """

    def __init__(self, run: Synchronizer, everyone: Changing, commits: Commits) -> None:
        self._run, self._everyone, self._commits = run, everyone, commits
        self._step, self._made = -1, 0

    def make(self, call: Callable[[], T], restore: Callable[[], None] | None = None, last: bool = False) -> T:
        """Make a call, and again if a worker is lost before all are done.

        `restore` puts back the weights that the call has changed. The `last` one of a run changes them, too;
        a worker that has its result may end without the others, who may have ended.
        """
        place, results = self._find_place(), list[T]()
        restore = agreement.remember(self._run.model) if last else restore
        if self._everyone.members.partial:
            self._gather(place)
        while not self.do(lambda: results.append(call())):
            self._everyone.may_end = last and self._everyone.unite(bool(results))[0]
            try:
                self._gather(place)
            except RunFinished:
                if not self._everyone.may_end:
                    raise
                break
            if restore is not None:
                restore()
        self._made += 1
        if self._everyone.members.partial:
            self._commits.ready = None  # those who wait at the next call are asked for then
        return results[-1]

    def settle(self) -> None:
        """Repeat rounds in the air until they have arrived, without applying them."""
        for part in self._run.parts:
            if isinstance(part, Exchange) and part._round is not None:
                self._commits.settle(part, Clock(self._run.steps, 0, self._run._lr))

    def do(self, call: Callable[[], object]) -> bool:
        """Make a call once. Return whether all members have made it; if not, they are to be asked for."""
        good = True
        try:
            call()
            self._run._comm.tell([]).wait()
        except PeerLost as error:
            logger.warning("%s", error)
            self._everyone.fail(error)
            good = False
        (whole,) = self._everyone.unite(good)
        if good and not whole:
            self._everyone.fail(PeerLost(INSIDE))
        return whole

    def start(self) -> bool:
        """Give rank 0's weights to all members. Return whether all have them."""
        comm, tensors = self._run._comm, agreement.list_all(self._run.model)
        with self._run._costs.including(comm):
            return self.do(lambda: agreement.run_collective(tensors, comm.broadcast))

    def _find_place(self) -> float:
        if self._run.steps != self._step:
            self._step, self._made = self._run.steps, 0
        return self._step + min(self._made, _MOST - 1) / _MOST

    def _gather(self, place: float) -> None:
        """Find the workers that are left and come to this place."""
        commits = self._commits
        if commits.asked:
            commits.answer()  # may know the worker that is lost: of no use
            self._everyone.fail(PeerLost("The members have changed."))
        commits.ready = None
        while commits.ready is None:
            commits.ask(place=place)
            members = commits.answer()
            if members.state is not None:
                raise PeerLost(GONE_ON)
            if not members.broken and members.lineage == commits.lineage:
                commits.ready = members

    @property
    def entered(self) -> tuple[int, ...]:
        """When each of the members has come."""
        return self._everyone.members.entered
