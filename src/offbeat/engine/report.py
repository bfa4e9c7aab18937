"""What a run costs: a report per round, totals, and the measurements that reports wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.errors import PeerLost
from offbeat.comm.communicator import Communicator, Metered, Pending


@dataclass(frozen=True)
class Report:
    """One round, as this worker saw it."""

    step: int  # iterations completed when it began
    round: int
    workers: int
    bytes_sent: int
    bytes_received: int
    seconds_waited: float  # time the worker stood still for it
    seconds_in_air: float  # from its beginning to the arrival of its last message
    drift: float | None  # mean over the workers of |x − x̄|², x taken when it lands
    norm: float | None  # length of the change it made here
    period: int  # steps since the round before


@dataclass
class Totals:
    """Everything so far, the start, `averaged()` and `finish()` included."""

    rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    seconds_in_air: float = 0.0

    @property
    def seconds_hidden(self) -> float:
        """Communication that cost no waiting."""
        return max(0.0, self.seconds_in_air - self.seconds_waited)

    def add(self, report: Report) -> None:
        self.rounds += 1
        self.bytes_sent += report.bytes_sent
        self.bytes_received += report.bytes_received
        self.seconds_waited += report.seconds_waited
        self.seconds_in_air += report.seconds_in_air


@contextmanager
def naming(when: Clock | Report) -> Iterator[None]:
    """Name the round in which a worker was lost, if one is lost inside."""
    try:
        yield
    except PeerLost as error:
        raise error.during(when.round, when.step) from error.__cause__


class Ledger:
    """Holds a report back until the mean drift of its round has arrived, so that nobody waits for it."""

    def __init__(self) -> None:
        self.emit: Callable[[Report], None] = lambda report: None
        self._open: deque[tuple[Report, float, bool, Pending[list[Tensor]]]] = deque()
        self._last: tuple[float, float, float] | None = None  # drift, loss, lr of the last known round
        self._loss: float | Tensor = 0.0  # sum of the losses observed since the last round landed
        self._losses = 0

    def observe(self, loss: float | Tensor) -> None:
        self._loss = self._loss + (loss.detach().double() if isinstance(loss, Tensor) else loss)
        self._losses += 1

    def mean_loss(self) -> float | None:
        """Of the losses observed since the last call; None if there were none."""
        if not self._losses:
            return None
        loss = float(self._loss) / self._losses
        self._loss, self._losses = 0.0, 0
        return loss

    def add(self, report: Report, lr: float, comm: Communicator, drift: float | None, loss: float) -> None:
        """Send this worker's drift and loss. The report follows when those of all of `comm` are here."""
        metered = Metered(comm)
        scalars = metered.mean([torch.tensor([drift or 0.0, loss], dtype=torch.float64)])
        sent, received = report.bytes_sent + metered.sent, report.bytes_received + metered.received
        report = replace(report, bytes_sent=sent, bytes_received=received)
        self._open.append((report, lr, drift is not None, scalars))

    def flush_reports(self, *, wait: bool) -> None:
        """Emit the reports that are complete; with `wait`, all of them."""
        while self._open and (wait or self._open[0][3].done()):
            report, lr, measured, scalars = self._open.popleft()
            with naming(report):
                drift, loss = scalars.wait()[0].tolist()
            self._last = (drift, loss, lr)
            self.emit(replace(report, drift=drift if measured else None))

    def add_measured(self, clock: Clock) -> Clock:
        """The clock with the drift, loss and rate of the last round that is known."""
        if self._last is None:
            return clock
        drift, loss, lr = self._last
        return replace(clock, drift=drift, loss=loss, round_lr=lr)

    def state_dict(self) -> State:
        self.flush_reports(wait=True)
        last = None if self._last is None else list(self._last)
        return {"last": last, "loss": float(self._loss), "losses": self._losses}

    def load_state_dict(self, state: State) -> None:
        self._last = None if state["last"] is None else tuple(state["last"])
        self._loss, self._losses = state["loss"], state["losses"]
        self._open.clear()
