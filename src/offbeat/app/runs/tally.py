"""Steps of a run, added up into lines of its log."""

from __future__ import annotations

from offbeat.app.runs.record import Record

LINES = 2000  # of steps in a log, at most; longer runs write one for several steps


class Tally:
    """Writes what so many steps took, together."""

    def __init__(self, record: Record, *, steps: int, units: int = 0) -> None:
        self.record, self.units = record, units
        self._every = -(-steps // LINES)
        self._count, self._seconds, self._waited, self._loss = 0, 0.0, 0.0, 0.0

    def add(self, step: int, *, start: float, end: float, waited: float, loss: float, units: int) -> None:
        self._count += 1
        self._seconds += end - start
        self._waited += waited
        self._loss += loss
        self.units += units
        if self._count == self._every:
            self.write(step, end)

    def write(self, step: int, end: float) -> None:
        """Whatever has come together since the last line."""
        if not self._count:
            return
        self.record.write(
            "steps",
            step=step,
            t=end,
            seconds=self._seconds,
            waited=self._waited,
            loss=self._loss / self._count,
            units=self.units,
        )
        self._count, self._seconds, self._waited, self._loss = 0, 0.0, 0.0, 0.0
