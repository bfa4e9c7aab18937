"""Who came to the rounds in time, who was late, and how long everybody waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.engine.report import Report

Kind = Literal["fresh", "late", "nothing new"]


@dataclass(frozen=True)
class GroupReport(Report):
    """A round of a group, as this worker saw it.

    "fresh": what it had just made was in the mean; "late": the others went on with something older of its;
    "nothing new": it was so late that it had used the newest mean at an earlier step.
    """

    kind: Kind
    age: int  # rounds since it had made what it contributed to the newest mean; 0: fresh


@dataclass(frozen=True)
class Attendance:
    """One worker, up to the last global round: the shares of its steps, and what it contributed."""

    rank: int
    fresh: float
    late: float
    nothing_new: float
    age: float  # of its contributions, in rounds, on average
    oldest: int
    waited: float  # seconds for rounds of its groups


class Tally:
    """Counts for `Attendance`, which travel in seven whole numbers."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, int] = {"fresh": 0, "late": 0, "nothing new": 0}
        self._rounds = self._ages = self._oldest = 0
        self._waited = 0.0

    def add(self, kind: Kind, waited: float) -> None:
        """One step of this worker."""
        self._kinds[kind] += 1
        self._waited += waited

    def contributed(self, ages: Sequence[int]) -> None:
        """Rounds its sidecar has run."""
        self._rounds += len(ages)
        self._ages += sum(ages)
        self._oldest = max([self._oldest, *ages])

    def words(self) -> list[int]:
        return [
            *self._kinds.values(),
            self._rounds,
            self._ages,
            self._oldest,
            round(self._waited * 1e6),
        ]


def attendance(heard: Sequence[Sequence[int]]) -> list[Attendance]:
    """From the words of all ranks."""
    found = []
    for rank, (fresh, late, nothing, rounds, ages, oldest, waited, *_) in enumerate(heard):
        steps = max(1, fresh + late + nothing)
        shares = (fresh / steps, late / steps, nothing / steps)
        found.append(Attendance(rank, *shares, ages / max(1, rounds), oldest, waited / 1e6))
    return found
