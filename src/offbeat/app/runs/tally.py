"""Adds up the steps of a run into lines of its log."""

from __future__ import annotations

from offbeat.app.runs.record import Record

LINES = 2000  # of steps in a log, at most; in a longer run, each covers several steps


class Tally:
    """Writes one line for every few steps."""

    def __init__(self, record: Record, *, steps: int, units: int = 0) -> None:
        self.record, self.units = record, units
        self._every = -(-steps // LINES)
        self._count, self._seconds, self._exposed, self._loss = 0, 0.0, 0.0, 0.0

    def add(self, step: int, *, start: float, end: float, exposed: float, loss: float, units: int) -> None:
        self._count += 1
        self._seconds += end - start
        self._exposed += exposed
        self._loss += loss
        self.units += units
        if self._count == self._every:
            self.write(step, end)

    def write(self, step: int, end: float) -> None:
        """Write the steps since the last line."""
        if not self._count:
            return
        mean = {"seconds": self._seconds, "exposed": self._exposed, "loss": self._loss / self._count}
        self.record.write("steps", step=step, t=end, **mean, units=self.units)
        self._count, self._seconds, self._exposed, self._loss = 0, 0.0, 0.0, 0.0
