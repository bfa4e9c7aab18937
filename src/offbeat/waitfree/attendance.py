"""Which workers reached the rounds in time, which were late, and how long each waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.engine.report import Report

Kind = Literal["fresh", "late", "nothing new"]


@dataclass(frozen=True)
class GroupReport(Report):
    """A round of a group, as this worker saw it.

    "fresh": the mean contains this worker's newest contribution. "late": the round used an older one.
    "nothing new": the worker was so late that it had already used the newest mean at an earlier step.
    """

    kind: Kind
    age: int  # of this worker's contribution to the newest mean, in rounds; 0 if fresh


@dataclass(frozen=True)
class Attendance:
    """The attendance of one worker up to the last global round."""

    rank: int
    fresh: float  # share of its steps, as are `late` and `nothing_new`
    late: float
    nothing_new: float
    age: float  # mean age of its contributions, in rounds
    oldest: int
    waited: float  # seconds spent waiting for rounds of its groups


class Tally:
    """The counts behind one worker's `Attendance`, sent as seven integers."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, int] = {"fresh": 0, "late": 0, "nothing new": 0}
        self._rounds = self._ages = self._oldest = 0
        self._waited = 0.0

    def add(self, kind: Kind, waited: float, ages: Sequence[int]) -> None:
        """Count one step of the worker, and the ages of what its sidecar contributed meanwhile."""
        self._kinds[kind] += 1
        self._waited += waited
        self._rounds += len(ages)
        self._ages += sum(ages)
        self._oldest = max([self._oldest, *ages])

    def to_ints(self) -> list[int]:
        waited = round(self._waited * 1e6)
        return [*self._kinds.values(), self._rounds, self._ages, self._oldest, waited]


def read_attendance(tallies: Sequence[Sequence[int]]) -> list[Attendance]:
    """Every rank's attendance, from the integers of its tally."""
    rows = []
    for rank, (fresh, late, nothing, rounds, ages, oldest, waited, *_) in enumerate(tallies):
        steps = max(1, fresh + late + nothing)
        shares = (fresh / steps, late / steps, nothing / steps)
        rows.append(Attendance(rank, *shares, ages / max(1, rounds), oldest, waited / 1e6))
    return rows
