"""What a rank tells the others about itself: where it is in its run, and why it left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

from offbeat.base.errors import (
    CheckpointMismatch,
    Disagreement,
    NotFinite,
    OffbeatError,
    PeerLost,
    RunFinished,
)

BATCHES = "Do all workers have the same number of batches?"
# The errors that all ranks raise.
_KINDS: tuple[type[OffbeatError], ...] = (CheckpointMismatch, Disagreement, NotFinite, PeerLost, RunFinished)
_SHARED = {kind.__name__: kind for kind in _KINDS}


@dataclass(frozen=True)
class Departure:
    """Why a rank left: a failure of its own, or an error that all ranks raise."""

    text: str
    shared: str | None = None  # the type of an error that all ranks raise

    @classmethod
    def of(cls, error: BaseException) -> Departure:
        shared = next((name for name, kind in _SHARED.items() if isinstance(error, kind)), None)
        return cls(str(error) if shared else f"failed ({type(error).__name__}: {error})", shared)

    def error(self, rank: int, what: str) -> OffbeatError:
        """The error for a worker that waits for `what` from this rank."""
        if self.shared in _SHARED:
            return _SHARED[self.shared](self.text)
        return PeerLost(f"Waiting for {what}: rank {rank} {self.text}.")


@dataclass(frozen=True)
class Place:
    """One moment of a run. A meeting is a call that every worker makes after the same step."""

    step: int = 0  # the iteration under way, or the last one completed
    meetings: int = 0  # how many are over
    meeting: str | None = None  # the call that waits for everyone
    begun: bool = False  # rank 0's weights have been sent: no others can be loaded

    def passed_by(self, other: Place) -> bool:
        """Whether `other` can no longer reach this meeting."""
        beyond = other.step > self.step or (other.begun and not self.begun)
        late = other.meetings <= self.meetings and beyond
        return late and self.meeting is not None and other.meeting is None

    def __str__(self) -> str:
        where = f"at step {self.step}"
        return where if self.meeting is None else f"in {self.meeting} {where}"


@dataclass(eq=False)
class Track:
    """The place of one worker in one run. Other threads read it while the worker moves on."""

    rank: int
    step: int = 0  # the iteration under way, or the last one completed
    meetings: int = 0
    meeting: Place | None = None  # where the worker waits for everyone
    begun: bool = False
    key: str = ""  # the name of the run, the same on all ranks

    def meet(self, call: str, step: int) -> None:
        self.meeting, self.step = Place(step, self.meetings, call, self.begun), step

    def met(self) -> None:
        self.meetings += 1
        self.meeting = None

    @property
    def place(self) -> Place:
        step, begun = self.step, self.begun  # read first: a meeting that ends meanwhile counts as over
        return self.meeting or Place(step, self.meetings, begun=begun)


def describe_disagreement(one: tuple[int, Place], other: tuple[int, Place]) -> str:
    """Return the sentence for two ranks that cannot meet any more, with the lower rank first."""
    (low, here), (high, there) = sorted((one, other), key=lambda item: item[0])
    advice = BATCHES
    if here.begun != there.begun:
        advice = f"Call {here.meeting or there.meeting} on every rank, before the first step."
    return f"Workers disagree: rank {low} is {here}, rank {high} {there}. {advice}"


def find_disagreement(tracks: Iterable[Track]) -> str | None:
    """Return the sentence for the first two workers of one run that cannot meet any more."""
    for one, other in permutations(tracks, 2):
        if one.key == other.key and one.place.passed_by(other.place):
            return describe_disagreement((one.rank, one.place), (other.rank, other.place))
    return None
