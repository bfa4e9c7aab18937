"""Where a worker is in its run, so that workers who wait for each other in different places find out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

BATCHES = "Do all workers have the same number of batches?"


@dataclass(frozen=True)
class Place:
    """One moment of a run. A meeting is a call that every worker makes after the same step."""

    step: int = 0  # the iteration under way, or the last one completed
    meetings: int = 0  # how many are over
    meeting: str | None = None  # the call that waits for everyone

    def passed_by(self, other: Place) -> bool:
        """Whether `other` can no longer come to the meeting that this one is at."""
        return (
            self.meeting is not None
            and other.meeting is None
            and other.meetings <= self.meetings
            and other.step > self.step
        )

    def __str__(self) -> str:
        where = f"at step {self.step}"
        return where if self.meeting is None else f"in {self.meeting} {where}"


def disagreement(one: tuple[int, Place], other: tuple[int, Place]) -> str:
    """The sentence for two ranks at places that exclude each other, the lower rank first."""
    (low, here), (high, there) = sorted((one, other), key=lambda item: item[0])
    return f"Workers disagree: rank {low} is {here}, rank {high} {there}. {BATCHES}"


@dataclass(eq=False)
class Track:
    """The place of one worker in one run. Other threads read it: a place is replaced as a whole."""

    rank: int
    place: Place = field(default_factory=Place)
    key: str = ""  # the name of the run, the same on all ranks

    def at(self, step: int) -> None:
        self.place = replace(self.place, step=step)

    def meet(self, call: str, step: int) -> None:
        self.place = replace(self.place, step=step, meeting=call)

    def met(self) -> None:
        self.place = replace(self.place, meeting=None, meetings=self.place.meetings + 1)


def find_disagreement(tracks: Iterable[Track]) -> str | None:
    """The sentence for the first two workers of one run who exclude each other."""
    known = list(tracks)
    for one in known:
        for other in known:
            if one.key == other.key and one.place.passed_by(other.place):
                return disagreement((one.rank, one.place), (other.rank, other.place))
    return None
