"""What a run costs: a report per round, totals, and the measurements that reports wait for."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from offbeat.base.clock import Clock, Cost, State
from offbeat.base.errors import PeerLost
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.engine.stopwatch import Stopwatch
from offbeat.when import Schedule

if TYPE_CHECKING:
    from offbeat.engine.part import Part
    from offbeat.engine.round import Round

logger = logging.getLogger("offbeat")

_RECENT = 32  # rounds in which metrics look for what not every part measures
_MEASURED = {
    "bytes_sent_round": "bytes_sent",
    "period": "period",
    "drift": "drift",
    "seconds_waited_mean": "waited_mean",
    "seconds_waited_max": "waited_max",
}


@dataclass(frozen=True)
class Report:
    """One round, as this worker saw it."""

    step: int  # iterations completed when it began
    round: int
    workers: int
    bytes_sent: int
    bytes_received: int
    seconds_waited: float  # time in which the worker did nothing but wait for it
    seconds_in_air: float  # its flight: from its beginning to the arrival of its last message
    drift: float | None  # mean over the workers of |x − x̄|², x taken when it lands
    norm: float | None  # length of the change it made here
    period: int  # steps since the round before
    # Mean and maximum over its workers: the seconds that each had waited in the run when the round began.
    waited_mean: float | None = field(default=None, kw_only=True)
    waited_max: float | None = field(default=None, kw_only=True)
    dropped: tuple[int, ...] = field(default=(), kw_only=True)  # ranks that the guard left out
    # In an elastic run: the names of the workers, in the order of ranks; how many did not count, because
    # they had just joined; and how often the round was repeated, because a worker was lost.
    members: tuple[str, ...] = field(default=(), kw_only=True)
    joined: int = field(default=0, kw_only=True)
    repeats: int = field(default=0, kw_only=True)
    late: ClassVar[bool] = False  # whether this worker missed the round


Emit = Callable[[Report], None]


@dataclass
class Totals:
    """The cost of the run so far, including the start, `averaged()` and `finish()`."""

    rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    seconds_in_air: float = 0.0
    late: int = 0  # rounds that this worker missed

    @property
    def seconds_hidden(self) -> float:
        """The seconds of communication that this worker did not wait for."""
        return max(0.0, self.seconds_in_air - self.seconds_waited)


class Costs:
    """What a run costs on this worker: the last 1 000 reports, and totals."""

    def __init__(self) -> None:
        self.reports: deque[Report] = deque(maxlen=1000)
        self.totals = Totals()

    def add(self, report: Report) -> None:
        self.reports.append(report)
        totals = self.totals
        totals.rounds += 1
        totals.bytes_sent += report.bytes_sent
        totals.bytes_received += report.bytes_received
        totals.seconds_waited += report.seconds_waited
        totals.seconds_in_air += report.seconds_in_air
        totals.late += report.late
        logger.debug("%s", report)

    def count(self, comm: Metered) -> None:
        """Add the bytes that a communicator has carried since the last call."""
        self.totals.bytes_sent += comm.sent
        self.totals.bytes_received += comm.received
        comm.sent = comm.received = 0

    def flush(self, parts: Sequence[Part]) -> None:
        """Wait for the reports of all parts, and count what they sent outside of rounds."""
        for part in parts:
            part.flush_reports(wait=True)
        self.count_outside(parts)

    def count_outside(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.outside is not None:
                self.count(part.outside)

    def metrics(self) -> dict[str, float]:
        """Return what is known so far, by name, with the last value of what not every round measures."""
        totals = self.totals
        known = {
            "bytes_sent_total": totals.bytes_sent, "bytes_received_total": totals.bytes_received,
            "seconds_waited": totals.seconds_waited, "seconds_hidden": totals.seconds_hidden,
            "round": totals.rounds, "late": totals.late,
        }  # fmt: skip
        for report in itertools.islice(reversed(self.reports), _RECENT):
            for name, attribute in _MEASURED.items():
                if name not in known and (value := getattr(report, attribute)) is not None:
                    known[name] = value
        return known

    @contextmanager
    def including(self, comm: Metered) -> Iterator[None]:
        """Add the bytes and seconds of blocking messages that are sent inside."""
        start = comm.now()
        try:
            yield
        finally:
            self.count(comm)
            self.totals.seconds_waited += comm.now() - start
            self.totals.seconds_in_air += comm.now() - start


@contextmanager
def naming(when: Clock) -> Iterator[None]:
    """If a worker is lost inside, the error names the round."""
    try:
        yield
    except PeerLost as error:
        raise error.during(when.round, when.step) from error.__cause__


class Ledger:
    """Holds reports back until the mean drift of their round has arrived, so that no worker waits for it."""

    def __init__(self, when: Schedule, *, drift: bool) -> None:
        self._when, self._needs, self._drift = when, when.needs, drift
        self.emit: Emit = lambda report: None
        # Only a schedule that depends on the time needs one.
        self.watch = Stopwatch() if when.timed or "cost" in when.needs else None
        self.open: deque[tuple[Report, float, bool, Pending[list[Tensor]], float]] = deque()
        self._last: tuple[float, float, float] | None = None  # drift, loss, lr of the last known round
        self._cost: Cost | None = None  # of the last known round
        self._asked = 0.0  # seconds of the last message with a cost
        self._loss: float | Tensor = 0.0  # sum of the losses observed since the last round landed
        self._losses = 0

    def bind(self, everyone: Communicator, emit: Emit) -> None:
        self._everyone, self.emit = everyone, emit

    def observe(self, losses: Sequence[float | Tensor]) -> None:
        for loss in losses if "loss" in self._needs else ():
            self._loss = self._loss + (loss.detach().double() if isinstance(loss, Tensor) else loss)
            self._losses += 1

    def mean_loss(self) -> float | None:
        """Return the mean of the losses observed since the last call; None if there were none."""
        loss = float(self._loss) / self._losses if self._losses else None
        self._loss, self._losses = 0.0, 0
        return loss

    def close(
        self, round: Round, drift: float | None, norm: float | None, *, stepped: bool, late: bool
    ) -> None:
        """Report a landed round, once the mean of drift or loss has arrived, if steps have been made."""
        if self.watch is not None:
            self.watch.land(self._everyone.now(), round.waited, late=late)
        loss = self.mean_loss() if "loss" in self._needs else 0.0
        if not self._drift or (loss is None and not stepped):
            self.flush(wait=True)  # reports come in the order of their rounds
            with nullcontext() if self.watch is None else self.paused():
                self.emit(round.report())
            return
        if loss is None:
            raise ValueError(f"{self._when!r} needs the loss: call sync.observe(loss) before sync.step().")
        # The schedule must decide the same on all workers, not only on those of this round.
        comm = Metered(self._everyone if self._needs else round.comm.comm)
        own, began = torch.tensor([drift or 0.0, loss], dtype=torch.float64), self._everyone.now()
        if "cost" in self._needs:
            flight = round.report().seconds_in_air
            assert self.watch is not None
            scalars = comm.gather(torch.cat([own, own.new_tensor([flight, self.watch.pace, self._asked])]))
        else:
            scalars = comm.mean([own])
        length = None if norm is None else math.sqrt(norm)
        sent, received = round.comm.sent + comm.sent, round.comm.received + comm.received
        report = round.report(norm=length, bytes_sent=sent, bytes_received=received)
        self.open.append((report, round.clock.lr, drift is not None, scalars, began))

    def flush(self, *, wait: bool) -> None:
        """Emit the reports that are complete; with `wait`, all of them. The wait is not part of a step."""
        if self.open:
            with nullcontext() if self.watch is None else self.paused():
                self._flush(wait=wait)

    def _flush(self, *, wait: bool) -> None:
        while self.open and (wait or self.open[0][3].done()):
            report, lr, measured, scalars, began = self.open.popleft()
            start = self._everyone.now()
            try:
                rows = torch.stack(scalars.wait())
            except PeerLost as error:
                if not report.members:
                    raise error.during(report.round, report.step) from error.__cause__
                # The round has been applied: its drift is not known.
                rows, measured = torch.zeros(1, 5), False
            drift, loss = rows[:, :2].mean(0).tolist()
            if "cost" in self._needs:
                cost = Cost(float(rows[:, 2].min()), float(rows[:, 3].max()), float(rows[:, 4].min()))
                self._cost = cost if cost.pace > 0 else None  # the first round knows no pace
                self._asked = max(0.0, scalars.arrived() - began)
            if self._needs:  # the schedule waits for it, so it is part of the round
                waited = self._everyone.now() - start
                seconds = report.seconds_waited + waited, report.seconds_in_air + waited
                report = replace(report, seconds_waited=seconds[0], seconds_in_air=seconds[1])
            self._last = (drift, loss, lr)
            self.emit(replace(report, drift=drift if measured else None))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, there are no reports that wait for a drift, which a worker that is lost may owe."""
        kept, self.open = self.open, deque()
        try:
            yield
        finally:
            self.open = kept

    def abandon(self) -> None:
        """Emit all reports now. In an elastic run, a lost worker may not have sent its part of a drift."""
        self.flush(wait=False)
        while self.open:
            self.emit(replace(self.open.popleft()[0], drift=None))

    def update(self, clock: Clock, *, opened: bool) -> Clock:
        """Return the clock with what is known about the last round. Waits if the schedule needs it.

        Time is measured from the first period on. It is `opened` when the schedule first plans a round.
        """
        elapsed = 0.0
        if self.watch is not None:
            if not opened:
                self.watch.restart(self._everyone.now())
            elapsed = self.watch.read(self._everyone.now())
        if self.open:
            self.flush(wait=bool(self._needs))
        drift, loss, lr = self._last or (None, None, None)
        return replace(clock, drift=drift, loss=loss, round_lr=lr, cost=self._cost, elapsed=elapsed)

    def pause(self, *, over: bool) -> None:
        """Stop the watch, or start it again when the pause is `over`."""
        if self.watch is not None:
            now = self._everyone.now()
            self.watch.go(now) if over else self.watch.stop(now)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside is not part of a step."""
        self.pause(over=False)
        try:
            yield
        finally:
            self.pause(over=True)

    def state_dict(self) -> State:
        watch = None if self.watch is None else self.watch.state_dict(self._everyone.now())
        self.flush(wait=True)
        last = None if self._last is None else list(self._last)
        cost = None if self._cost is None else list(self._cost)
        own = {"loss": float(self._loss), "losses": self._losses, "asked": self._asked}
        return {"last": last, "cost": cost, "watch": watch, **own}

    def load_state_dict(self, state: State) -> None:
        self._last = None if state["last"] is None else tuple(state["last"])
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"], self._everyone.now())
        self._cost = None if state["cost"] is None else Cost(*state["cost"])
        self._loss, self._losses, self._asked = state["loss"], state["losses"], state["asked"]
        self.open.clear()
