"""Which workers a round waits for: all, late ones for a while, or only as many as it needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from offbeat.waitfree.answers import Answers, Verdict
from offbeat.waitfree.rounds import Rounds

_FIRST_LOOK, _LOOKS = 1.0, 20  # seconds until rank 0 asks who is alive; each pause is twice the one before
_ATTEMPTS = 8  # bits of an announcement that number it within its round


class WaitRule:
    """Which workers the rounds of sidecars wait for. A frozen value; sidecars ask it before a round."""

    def wait(self, rounds: Rounds, round: int) -> None:
        """Return once the round may run."""
        raise NotImplementedError


@dataclass(frozen=True)
class Everyone(WaitRule):
    """Each sidecar waits for its own worker, so a round waits for all of them."""

    def wait(self, rounds: Rounds, round: int) -> None:
        own = rounds.handover
        with rounds.sidecar.locked():
            rounds.sidecar.until(lambda: own.version >= round, f"its worker or a call to round {round}")


@dataclass(frozen=True)
class Grace(WaitRule):
    """Once a worker has called for the round, each sidecar waits this long for its own worker.

    With None it waits until its worker is overdue, and not at all if the worker is rounds behind.
    """

    seconds: float | None = None

    def wait(self, rounds: Rounds, round: int) -> None:
        sidecar, own, what = rounds.sidecar, rounds.handover, f"its worker or a call to round {round}"
        with sidecar.locked():
            sidecar.until(lambda: own.version >= round or sidecar.heard >= round, what)
            patience = self.seconds
            if patience is None:
                patience = rounds.due - sidecar.comm.now() if own.version == round - 1 else 0.0
            if own.version < round and patience > 0:
                sidecar.until(lambda: own.version >= round, f"round {round}", patience)


@dataclass(frozen=True)
class Enough(WaitRule):
    """A round waits until enough answers have arrived to decode, and up to `grace` seconds for the rest.

    Workers tell rank 0's sidecar that they have answered. Once the answers are enough, it tells all others,
    so that all use the same ones. While it waits, it asks all sidecars from time to time whether they are
    alive, because a lost worker never answers.
    """

    grace: float = 0.0

    def wait(self, rounds: Rounds, round: int) -> None:
        size, answers = rounds.sidecar.comm.size, rounds.handover
        assert isinstance(answers, Answers)
        count = _Count(rounds, answers, round, self.grace) if rounds.sidecar.comm.rank == 0 else None
        for attempt in itertools.count():
            words = _obey(rounds, round, attempt, self.grace) if count is None else count.decide(attempt)
            if words:
                break
            rounds.aside.tell([]).wait()  # raises if a worker is lost
        sets = [frozenset(r for r in range(size) if words >> shift + r & 1) for shift in (size, 0)]
        answers.decide(Verdict(*sets))


class _Count:
    """The answers of one round, counted by rank 0's sidecar."""

    def __init__(self, rounds: Rounds, answers: Answers, round: int, grace: float) -> None:
        self._sidecar, self._rounds, self._answers = rounds.sidecar, rounds, answers
        self._round, self._grace, self._ranks = round, grace, frozenset(range(rounds.sidecar.comm.size))
        self._twice: float | None = None  # the end of twice the time that half of the workers took
        self._prompt: frozenset[int] | None = None  # the ranks that had answered by then

    def _heard(self, rank: int) -> int:
        """Return the last round that a worker has answered, even if too late."""
        start = self._rounds.first - 1
        return max(start, self._sidecar.heard_from(rank)) if rank else self._answers.version

    def _there(self) -> frozenset[int]:
        return frozenset(rank for rank in self._ranks if self._heard(rank) >= self._round)

    def _enough(self) -> bool:
        return self._answers.clusters.enough(self._there())

    def _some(self) -> bool:
        return 2 * len(self._there()) >= len(self._ranks) or self._enough()

    def decide(self, attempt: int) -> int:
        """Wait for enough answers, and announce the verdict. 0: it takes long, so all must respond."""
        sidecar, now, words = self._sidecar, self._sidecar.comm.now, 0
        end = now() + _FIRST_LOOK * 2**attempt if attempt < _LOOKS else inf
        with sidecar.locked():
            if self._twice is None and self._until(self._some, end):
                self._twice = 2 * now() - self._rounds.began
            if self._twice is not None and self._prompt is None:
                if self._until(self._enough, min(end, self._twice)):
                    self._prompt = self._ranks
                elif now() >= self._twice:
                    self._prompt = self._there()
            if self._prompt is not None and self._until(self._enough, end):
                self._until(lambda: self._there() == self._ranks, now() + self._grace)
                words = self._write(self._prompt)
            number = (self._round << _ATTEMPTS | attempt) << 2 * len(self._ranks)
            sidecar.announce(number | words)
        return words

    def _until(self, ready: Callable[[], bool], end: float) -> bool:
        what, now = f"enough answers in round {self._round}", self._sidecar.comm.now()
        return ready() or (end > now and self._sidecar.until(ready, what, None if end == inf else end - now))

    def _write(self, prompt: frozenset[int]) -> int:
        """Return the verdict as bits: who has answered, then who is late. A worker is late if it is more than
        a round behind, or took twice as long as half of the workers."""
        there, behind = self._there(), {r for r in self._ranks if self._heard(r) < self._round - 1}
        late = (self._ranks - prompt) | behind
        return sum(1 << len(self._ranks) + rank for rank in there) | sum(1 << rank for rank in late)


def _obey(rounds: Rounds, round: int, attempt: int, grace: float) -> int:
    """On all other ranks: wait for the verdict of rank 0. 0: it asks whether this rank is alive."""
    sidecar, shift, number = rounds.sidecar, 2 * rounds.sidecar.comm.size, round << _ATTEMPTS | attempt
    what, seconds = f"the verdict on round {round}", _FIRST_LOOK * 2**attempt + grace
    with sidecar.locked():
        return sidecar.await_number(0, number << shift, what, seconds) & (1 << shift) - 1
