"""What rounds tell: drift and loss, reduced over the workers, and the reports that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.engine.report import Report
from offbeat.engine.round import Round, naming


class Ledger:
    """Reports are handed in when the mean drift of their round has arrived: nobody waits for it."""

    def __init__(self) -> None:
        self.emit: Callable[[Report], None] = lambda report: None
        self._open: deque[tuple[Report, float, bool, Pending[list[Tensor]]]] = deque()
        self._last: tuple[float, float, float] | None = None  # drift, loss and lr of the last round known
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

    def add(
        self, round_: Round, comm: Communicator, drift: float | None, loss: float, norm: float | None
    ) -> None:
        """Send this worker's drift and loss; the report follows when those of all of `comm` have come."""
        metered = Metered(comm)
        scalars = metered.mean([torch.tensor([drift or 0.0, loss], dtype=torch.float64)])
        report = round_.report(norm)
        sent, received = report.bytes_sent + metered.sent, report.bytes_received + metered.received
        report = replace(report, bytes_sent=sent, bytes_received=received)
        self._open.append((report, round_.clock.lr, drift is not None, scalars))

    def flush_reports(self, *, wait: bool) -> None:
        """Hand in what is complete; with `wait`, everything."""
        while self._open and (wait or self._open[0][3].done()):
            report, lr, measured, scalars = self._open.popleft()
            with naming(report):
                drift, loss = scalars.wait()[0].tolist()
            self._last = (drift, loss, lr)
            self.emit(replace(report, drift=drift if measured else None))

    def told(self, clock: Clock) -> Clock:
        """The clock with what the last round told."""
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
