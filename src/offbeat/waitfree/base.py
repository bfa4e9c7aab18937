"""What parts that wait for nobody have in common."""

from __future__ import annotations

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from offbeat.among import Butterfly, Peers, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.tensors import Live
from offbeat.comm.background import Sidecar
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.comm.presence import Departure
from offbeat.engine.part import Part
from offbeat.engine.report import Report
from offbeat.reduce import Mean, Reducer
from offbeat.waitfree.attendance import Attendance, GroupReport, Kind, Tally, attendance
from offbeat.waitfree.rounds import Load, Outcome, Rounds, Timetable

logger = logging.getLogger("offbeat")

REMEMBERED = 20  # steps
_LEAST = 0.1  # of the median step
_SPREAD = 5.0  # median deviations: three and a half standard ones, if they are normal
Among = Butterfly | World


def allowance(seconds: Sequence[float]) -> float:
    """What a step may take before it is overdue, by how long the last ones took.

    Medians, so that delays which hit fewer than half of the steps are no part of what is usual.
    """
    usual = statistics.median(seconds)
    spread = statistics.median(abs(second - usual) for second in seconds)
    return usual + max(_LEAST * usual, _SPREAD * spread)


class Waitfree(Part):
    """Round t follows step t + 1. Every `every`-th is blocking: there all workers are at the same step.

    `grace` is how many seconds a sidecar waits for its own worker after somebody called to a round: larger
    makes fewer workers late, and keeps the others waiting longer. None: it waits until the worker has taken
    longer for this step than is usual, unless it is rounds behind: a tenth longer than the median of its last
    20, or five times their median deviation where that is more.
    """

    sidecars = False  # whether they hold the blocking rounds too

    def __init__(
        self, live: Live, *, every: int, among: Among, grace: float | None, reduce: Reducer | None = None
    ) -> None:
        if not is_whole(every, 1):
            raise ValueError(
                f"every={every!r}: a whole number of steps, 1 or more, is needed, since all must know in "
                "advance which rounds are global."
            )
        if grace is not None and not 0 <= grace < float("inf"):
            raise ValueError(f"grace={grace!r}: seconds, 0 or more, or None are needed.")
        if reduce is not None and (not isinstance(reduce, Mean) or reduce.lossy):
            raise ValueError(
                f"reduce={reduce!r}: groups sum the weights themselves, old ones among them, which "
                "a lossy code would spoil: use Mean(), or leave reduce out."
            )
        self.live, self.every, self.grace, self.among = live, every, grace, among
        self.peers: Peers = among
        self.model = live.model
        self.reduce: Reducer = Mean() if reduce is None else reduce
        self._report: Callable[[Report], None] = lambda report: None
        self._sidecar: Sidecar | None = None
        self._rounds: Rounds | None = None
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._resumed: float | None = None  # when the worker's own work began
        self._used = -1  # the newest round whose result was used
        self._end: Callable[[], object] = lambda: None
        self._left = False
        self._tally = Tally()
        self._heard: Pending[list[list[int]]] | None = None
        self._attendance: list[Attendance] = []
        self.outside = Metered(self.peers.everyone)
        self.saved_every = every if self.active else 1

    @property
    def attendance(self) -> list[Attendance]:
        """Every rank's, up to the last global round; waits for it to arrive. Empty before the first."""
        if self._heard is not None:
            self._attendance = attendance(self._heard.wait())
            self._heard = None
        return self._attendance

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        self._report = report

    def communicators(self) -> list[Communicator]:
        if self._sidecar is None and self.active:
            self._sidecar = self.peers.everyone.worker.sidecar()
            aside = replace(self.among, group=self._sidecar.comm)
            for round in range(aside.cycle):
                aside.at(round)  # connects to its peers, while everybody is here
        return [self.peers.everyone]

    @property
    def active(self) -> bool:
        """Whether there is anything for sidecars to do."""
        return self.peers.everyone.size > 1

    def plan(self, clock: Clock) -> None:
        if not self.active:
            return
        if self._left:
            raise RuntimeError("step(): this run was ended by an error; make a new synchronizer to go on.")
        if self._rounds is None:
            self._open(clock.step)
        assert self._rounds is not None
        self._rounds.sidecar.check()

    def _open(self, first: int) -> None:
        self.communicators()
        assert self._sidecar is not None
        timetable = Timetable(self.every, replace(self.among, group=self._sidecar.comm), self.sidecars)
        load = self.load(first, self._sidecar)
        self._rounds = Rounds(self._sidecar, load, first=first, reduce=self.reduce, timetable=timetable)
        # The threads know nothing of this part: they end when it is forgotten, or the process ends.
        self._end = weakref.finalize(self, self._rounds.stop)
        self._used = first - 1
        self._rounds.grace = self.grace
        self._expect()
        self._rounds.start()

    def load(self, first: int, sidecar: Sidecar) -> Load:
        """What worker and sidecar hand to each other from round `first` on."""
        raise NotImplementedError

    def blocking(self, round: int) -> bool:
        return (round + 1) % self.every == 0

    def await_round(self, round: int) -> tuple[Outcome, Kind]:
        """The newest round once this one is done, and how this worker came to it. Reports it."""
        assert self._rounds is not None
        comm = self.peers.everyone
        began = comm.now()
        outcome = self._rounds.wait(round)
        waited = comm.now() - began
        kind: Kind = "late" if outcome.version < round else "fresh"
        if outcome.round == self._used:
            kind = "nothing new"
        self._used = outcome.round
        self._tell(round, outcome, kind, waited)
        return outcome, kind

    def _tell(self, round: int, outcome: Outcome, kind: Kind, waited: float) -> None:
        assert self._rounds is not None
        cost, ages = self._rounds.collect()
        self._tally.add(kind, waited)
        self._tally.contributed(ages)
        self._report(
            GroupReport(
                step=round + 1,
                round=round,
                workers=outcome.workers,
                bytes_sent=cost.sent,
                bytes_received=cost.received,
                seconds_waited=waited,
                seconds_in_air=cost.in_air,
                drift=None,
                norm=None,
                period=1,
                kind=kind,
                age=outcome.round - outcome.version,
            )
        )

    def call_the_roll(self) -> None:
        """At a global round: everybody's tally, on its way."""
        logger.debug("%s", self.attendance)
        self._heard = self._say(self._tally.words())

    def _say(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        """Numbers for everybody; their bytes are in the totals, but in no report."""
        assert self.outside is not None
        return self.outside.tell(numbers)

    def submit(self, round: int, publish: Callable[[], None], *, call: bool, timed: bool) -> None:
        """What was made for a round becomes the newest; `timed`: nothing else was waited for in the step."""
        assert self._rounds is not None
        if timed and self._resumed is not None:
            self._durations.append(self.peers.everyone.now() - self._resumed)
        self._rounds.submit(round, publish, call=call)

    def resume(self) -> None:
        """The worker goes back to its computation."""
        assert self._rounds is not None
        self._resumed = self.peers.everyone.now()
        with self._rounds.sidecar.locked():
            self._expect()

    def _expect(self) -> None:
        """Tell the sidecar when the worker is overdue."""
        assert self._rounds is not None
        if self._durations and self._resumed is not None:
            self._rounds.due = self._resumed + allowance(self._durations)

    def flush_reports(self, *, wait: bool) -> None:
        if wait:
            _ = self.attendance

    def flush(self, clock: Clock) -> None:
        if self._rounds is not None:
            self._stop()
            # Nobody goes before all have stopped listening: the store may go with its host.
            self._say([]).wait()

    def leave(self, departure: Departure) -> None:
        self._left = True
        self._stop()
        super().leave(departure)

    def _stop(self) -> None:
        if self._rounds is not None:
            self._end()
        self._rounds = self._sidecar = None

    def state_dict(self) -> State:
        return {"durations": list(self._durations)}

    def load_state_dict(self, state: State) -> None:
        if self._rounds is not None:
            self._stop()
            self.communicators()
        self._durations.clear()
        self._durations.extend(state["durations"])
        self._resumed = self.peers.everyone.now()
