"""What the wait-free parts have in common."""

from __future__ import annotations

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from offbeat.among import Butterfly, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.errors import BadArgument
from offbeat.base.tensors import Live
from offbeat.comm.background import Sidecar
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.comm.presence import Departure
from offbeat.engine.part import Part
from offbeat.engine.report import Emit
from offbeat.reduce import Mean, Reducer
from offbeat.waitfree.rounds import WORDS, Attendance, Handover, Kind, Rounds
from offbeat.waitfree.wait_rules import Everyone, Grace, WaitRule

logger = logging.getLogger("offbeat")

REMEMBERED = 20  # steps whose durations are remembered
_MIN_SLACK = 0.1  # of the median step
_SPREAD = 5.0  # median deviations; 3.4 standard deviations of a normal distribution
Among = Butterfly | World


def allowance(seconds: Sequence[float]) -> float:
    """Return how long a step may take, given recent ones. Medians ignore delays of fewer than half."""
    usual = statistics.median(seconds)
    spread = statistics.median(abs(second - usual) for second in seconds)
    return usual + max(_MIN_SLACK * usual, _SPREAD * spread)


class Waitfree(Part):
    """A part whose round t follows step t + 1. Every `every`-th round blocks until all workers arrive.

    `grace` is how many seconds a sidecar waits for its own worker after another worker has called for a
    round. Larger values make fewer workers late and keep the others waiting longer. With None, the sidecar
    waits until the current step is overdue, and does not wait at all for a worker that is rounds behind. A
    step is overdue when it exceeds the median of the last 20 by a tenth, or by five median deviations if
    those are more.
    """

    unshared = "its rounds do not wait for all workers"
    sidecars = False  # whether sidecars also run the blocking rounds
    handover: Handover

    def __init__(
        self, live: Live, *, every: int, among: Among, grace: float | None, reduce: Reducer | None = None
    ) -> None:
        if not is_whole(every, 1):
            raise BadArgument("every", every, "every must be a whole number of steps, at least 1.")
        if grace is not None and not 0 <= grace < float("inf"):
            raise BadArgument("grace", grace, "grace must be a number of seconds, at least 0, or None.")
        if reduce is not None and (not isinstance(reduce, Mean) or reduce.lossy):
            raise BadArgument("reduce", reduce, "a lossy code would round the weights: use Mean() or None.")
        self.live, self.model, self.every, self.grace = live, live.model, every, grace
        self.peers = self.among = among
        self.reduce: Reducer = Mean() if reduce is None else reduce
        self.outside: Metered = Metered(among.everyone)
        size = among.size if isinstance(among, Butterfly) else among.everyone.size
        self.active = size > 1 and (every > 1 or self.sidecars)  # whether sidecars have anything to do
        self.saved_every = every if self.active else 1
        self._sidecar: Sidecar | None = None
        self._rounds: Rounds | None = None
        self._stop_sidecar: Callable[[], object] = lambda: None
        self._durations, self._left = deque[float](maxlen=REMEMBERED), False
        self._resumed: float | None = None  # when the worker's computation last began
        self._tally = dict.fromkeys(WORDS, 0.0)
        self._tallies: Pending[list[list[int]]] = arrived([])  # of all workers at the last global round

    @property
    def attendance(self) -> list[Attendance]:
        """Every rank's attendance up to the last global round. Empty before the first. May wait for it."""
        return [Attendance.read(rank, words) for rank, words in enumerate(self._tallies.wait())]

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        self._emit = report

    def communicators(self) -> list[Communicator]:
        if self._sidecar is None and self.active:
            self._sidecar = self.peers.everyone.worker.sidecar()
            aside = replace(self.among, group=self._sidecar.comm)
            for round in range(aside.cycle):
                aside.at(round)  # connects the groups while all workers are here
        return [self.peers.everyone]

    def blocking(self, round: int) -> bool:
        return (round + 1) % self.every == 0

    def calls(self, round: int) -> bool:
        """Whether this worker's arrival starts a round that does not block."""
        return True

    def wait_rules(self) -> tuple[WaitRule, WaitRule]:
        """The rule for rounds that do not block, and the rule for those that do."""
        return Grace(self.grace), Everyone()

    def open_handover(self, version: int, sidecar: Sidecar) -> None:
        """Make `handover`, through which worker and sidecar pass tensors after round `version`."""
        raise NotImplementedError

    def plan(self, clock: Clock) -> None:
        if not self.active:
            return
        if self._left:
            raise RuntimeError("step(): an error has ended this run; make a new synchronizer to continue.")
        self.open(clock.step)
        assert self._rounds is not None
        self._rounds.sidecar.check()

    def open(self, step: int) -> None:
        """Start the sidecar, unless it runs. The round of this step is its first."""
        if self._rounds is None:
            self.communicators()
            assert self._sidecar is not None
            self.open_handover(step - 1, self._sidecar)
            among = replace(self.among, group=self._sidecar.comm)
            how = self.every, self.sidecars, self.wait_rules(), self._due()
            rounds = Rounds(self._sidecar, self.handover, among, self.reduce, *how)
            # The threads hold no reference to this part: they end when it is collected or the process exits.
            self._stop_sidecar = weakref.finalize(self, self._sidecar.stop)
            self._sidecar.start(rounds.run)
            self._rounds = rounds

    def submit(self, round: int, tensors: Sequence[Tensor]) -> None:
        """Hand over this worker's contribution to a round, and call the other workers."""
        assert self._rounds is not None
        sidecar, blocking = self._rounds.sidecar, self.blocking(round)
        if blocking and not self.sidecars:
            self.handover.reset(tensors)
        else:
            self.handover.write(tensors)
            if self._resumed is not None:
                self._durations.append(self.peers.everyone.now() - self._resumed)
        with sidecar.locked():
            self.handover.publish()
            self.handover.version = round
            if not blocking and sidecar.heard < round and self.calls(round):
                sidecar.announce(round)

    def await_round(self, round: int, tensors: Sequence[Tensor]) -> None:
        """Wait for a round, merge its result, and report it. Since the last call, any number may have run."""
        rounds, began = self._rounds, self.peers.everyone.now()
        assert rounds is not None
        with rounds.sidecar.locked():
            rounds.sidecar.until(lambda: rounds.done >= round, f"round {round}")
            self.handover.fetch()
            newest, news, rounds.news = rounds.newest, rounds.news, []
        waited = self.peers.everyone.now() - began
        assert newest is not None
        late = newest.round - newest.age < round
        kind: Kind = "nothing new" if not news else "late" if late else "fresh"
        tally, ages = self._tally, [report.age for report in news]
        tally[kind] += 1
        tally["rounds"] += len(ages)
        tally["ages"] += sum(ages)
        tally["oldest"] = max([tally["oldest"], *ages])
        tally["microseconds"] += waited * 1e6
        costs = ("bytes_sent", "bytes_received", "seconds_in_air")
        sums = {name: sum(getattr(report, name) for report in news) for name in costs}
        self._emit(replace(newest, step=round + 1, round=round, seconds_waited=waited, kind=kind, **sums))
        self.handover.merge(tensors, newest.workers if news else 1, late)

    def after(self, clock: Clock) -> None:
        """Share the attendance after a global round. Then the computation begins again."""
        if not self.active:
            return
        assert self._rounds is not None
        if self.blocking(clock.step - 1):
            logger.debug("%s", self.attendance)
            self._tallies = self.outside.tell([round(count) for count in self._tally.values()])
        self._resumed = self.peers.everyone.now()
        with self._rounds.sidecar.locked():
            self._rounds.due = self._due()

    def _due(self) -> float:
        """Return when the worker is overdue; 0 until a step has been timed."""
        if self._resumed is None or not self._durations:
            return 0.0
        return self._resumed + allowance(self._durations)

    def flush_reports(self, *, wait: bool) -> None:
        if wait:
            self._tallies.wait()

    def flush(self, clock: Clock) -> None:
        if self._rounds is not None:
            self._stop()
            # No worker exits before all have stopped listening: the store may end with its host.
            self.outside.tell([]).wait()

    def leave(self, departure: Departure) -> None:
        self._left = True
        self._stop()
        super().leave(departure)

    def _stop(self) -> None:
        self._stop_sidecar()
        self._rounds = self._sidecar = None

    def state_dict(self) -> State:
        return {"durations": list(self._durations)}

    def load_state_dict(self, state: State) -> None:
        if self._rounds is not None:
            self._stop()
            self.communicators()
        self._durations = deque(state["durations"], REMEMBERED)
        self._resumed = self.peers.everyone.now()
