"""Which workers reached the rounds in time, which were late, and how long each waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.engine.report import Report

Kind = Literal["fresh", "late", "nothing new"]
WORDS = ("fresh", "late", "nothing new", "rounds", "ages", "oldest", "microseconds")


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

    @classmethod
    def read(cls, rank: int, words: Sequence[int]) -> Attendance:
        """From the worker's `WORDS`, counted over the whole run."""
        fresh, late, nothing, rounds, ages, oldest, microseconds = words[: len(WORDS)]
        steps, age = max(1, fresh + late + nothing), ages / max(1, rounds)
        return cls(rank, fresh / steps, late / steps, nothing / steps, age, oldest, microseconds / 1e6)
