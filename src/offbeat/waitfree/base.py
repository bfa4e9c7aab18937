"""What the wait-free parts have in common."""

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
from offbeat.waitfree.attendance import Attendance, GroupReport, Kind, Tally, read_attendance
from offbeat.waitfree.handover import Handover
from offbeat.waitfree.rounds import Outcome, Rounds, Timetable, is_blocking

logger = logging.getLogger("offbeat")

REMEMBERED = 20  # steps whose durations say what is usual
_MIN_SLACK = 0.1  # of the median step
_SPREAD = 5.0  # median deviations; 3.4 standard deviations of a normal distribution
Among = Butterfly | World


def allowance(seconds: Sequence[float]) -> float:
    """How long a step may take before it is overdue, given the durations of recent steps.

    Medians ignore delays that hit fewer than half of the steps.
    """
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

    sidecars = False  # whether sidecars also run the blocking rounds

    def __init__(
        self, live: Live, *, every: int, among: Among, grace: float | None, reduce: Reducer | None = None
    ) -> None:
        if not is_whole(every, 1):
            raise ValueError(
                f"every={every!r}: every must be a whole number of steps, at least 1, because all workers "
                "must know in advance which rounds are global."
            )
        if grace is not None and not 0 <= grace < float("inf"):
            raise ValueError(f"grace={grace!r}: grace must be a number of seconds, at least 0, or None.")
        if reduce is not None and (not isinstance(reduce, Mean) or reduce.lossy):
            raise ValueError(
                f"reduce={reduce!r}: groups average the weights themselves, which a lossy code would round: "
                "use Mean(), or leave reduce out."
            )
        self.live, self.model = live, live.model
        self.every, self.grace, self.among = every, grace, among
        self.peers: Peers = among
        self.reduce: Reducer = Mean() if reduce is None else reduce
        self._report: Callable[[Report], None] = lambda report: None
        self._sidecar: Sidecar | None = None
        self._rounds: Rounds | None = None
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._resumed: float | None = None  # when the worker's computation last began
        self._used = -1  # the newest round whose result the worker has used
        self._end: Callable[[], object] = lambda: None
        self._left = False
        self._tally = Tally()
        self._tallies: Pending[list[list[int]]] | None = None
        self._attendance: list[Attendance] = []
        self.outside = Metered(self.peers.everyone)
        self.saved_every = every if self.active else 1

    @property
    def attendance(self) -> list[Attendance]:
        """Every rank's attendance up to the last global round. Empty before the first. May wait for it."""
        if self._tallies is not None:
            self._attendance = read_attendance(self._tallies.wait())
            self._tallies = None
        return self._attendance

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        self._report = report

    def communicators(self) -> list[Communicator]:
        if self._sidecar is None and self.active:
            self._sidecar = self.peers.everyone.worker.sidecar()
            aside = replace(self.among, group=self._sidecar.comm)
            for round in range(aside.cycle):
                aside.at(round)  # connects the groups while all workers are here
        return [self.peers.everyone]

    @property
    def active(self) -> bool:
        """Whether there is anything for sidecars to do."""
        return self.peers.everyone.size > 1

    def plan(self, clock: Clock) -> None:
        if not self.active:
            return
        if self._left:
            raise RuntimeError("step(): an error has ended this run; make a new synchronizer to continue.")
        if self._rounds is None:
            self._open(clock.step)
        assert self._rounds is not None
        self._rounds.sidecar.check()

    def _open(self, first: int) -> None:
        self.communicators()
        assert self._sidecar is not None
        self._rounds = Rounds(
            self._sidecar,
            self.open_handover(first - 1, self._sidecar),
            first=first,
            reduce=self.reduce,
            timetable=Timetable(self.every, replace(self.among, group=self._sidecar.comm), self.sidecars),
            grace=self.grace,
        )
        # The threads hold no reference to this part, so they end when it is collected or the process exits.
        self._end = weakref.finalize(self, self._sidecar.stop)
        self._used = first - 1
        self._set_due()
        self._sidecar.start(self._rounds.run)

    def open_handover(self, version: int, sidecar: Sidecar) -> Handover:
        """Memory for the tensors that worker and sidecar pass to each other after round `version`."""
        raise NotImplementedError

    def blocking(self, round: int) -> bool:
        return is_blocking(round, self.every)

    def await_round(self, round: int) -> tuple[Outcome, Kind]:
        """Wait for a round and report it. Returns the newest round and this worker's part in it."""
        assert self._rounds is not None
        comm = self.peers.everyone
        began = comm.now()
        outcome = self._rounds.wait(round)
        waited = comm.now() - began
        kind: Kind = "late" if outcome.version < round else "fresh"
        if outcome.round == self._used:
            kind = "nothing new"
        self._used = outcome.round
        cost = self._rounds.collect()
        self._tally.add(kind, waited, cost.ages)
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
        return outcome, kind

    def share_attendance(self) -> None:
        """At a global round: send this worker's tally to all workers."""
        logger.debug("%s", self.attendance)
        self._tallies = self._send_ints(self._tally.to_ints())

    def _send_ints(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        """Send integers to all workers. Their bytes count in the totals but in no report."""
        assert self.outside is not None
        return self.outside.tell(numbers)

    def submit(self, round: int, publish: Callable[[], None], *, call: bool, timed: bool) -> None:
        """Publish the contribution to a round. `timed`: the step since `resume` was pure computation."""
        assert self._rounds is not None
        if timed and self._resumed is not None:
            self._durations.append(self.peers.everyone.now() - self._resumed)
        self._rounds.submit(round, publish, call=call)

    def resume(self) -> None:
        """The worker returns to its computation."""
        assert self._rounds is not None
        self._resumed = self.peers.everyone.now()
        with self._rounds.sidecar.locked():
            self._set_due()

    def _set_due(self) -> None:
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
            # No worker exits before all have stopped listening: the store may end with its host.
            self._send_ints([]).wait()

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
