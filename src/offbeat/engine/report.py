"""What a run costs: a report per round, and totals."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.base.clock import Clock
from offbeat.comm.communicator import Metered


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

    @classmethod
    def blocking(cls, clock: Clock, comm: Metered, began: float, period: int) -> Report:
        """Of something sent and waited for since `began`, whose drift is not measured."""
        seconds, counts = comm.now() - began, (comm.sent, comm.received)
        return cls(clock.step, clock.round, comm.size, *counts, seconds, seconds, None, None, period)


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
