"""Members by a script, for simulations: the same rounds as in a run whose members were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offbeat.base.clock import State
from offbeat.base.errors import OffbeatError, PeerLost
from offbeat.comm.changing import Card, Give, Members
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure
from offbeat.elastic.decision import Decision, Seat
from offbeat.elastic.gathering import Gathering

_FAILURES = 3  # attempts after the script that may fail; more have lost a worker that the script still has


@dataclass(frozen=True)
class Attempt:
    """One attempt at a round: the simulated workers that make it, and those of them that join for it."""

    workers: Sequence[int]
    joining: Sequence[int] = ()


class Scripted(Gathering):
    """Simulated workers that come and go by a script, which lists the attempts of all rounds in order.

    A worker that is not in the next attempt is gone: it raises `PeerLost`. One that joins starts with its
    first attempt; those of the first attempt that do not join start the run.

        def worker(comm):
            group = Scripted(comm, [Attempt([0, 1, 2]), Attempt([0, 2])])
            sync = offbeat.local_sgd(model, optimizer, group=group)
    """

    def __init__(self, comm: Communicator, script: Sequence[Attempt]) -> None:
        super().__init__(f"{comm.rank:04}", comm.split([[rank] for rank in range(comm.size)]))
        self._all, self._script = comm, list(script)
        self._next = -1  # the attempt before; −1 is the start of the run
        first = [i for i, attempt in enumerate(script) if comm.rank in attempt.joining]
        if first and comm.rank not in self._starting:
            self._next = first[0] - 1
        self._card: tuple[Card, Give] | None = None
        self._failures = 0  # of attempts after the script

    @property
    def _starting(self) -> list[int]:
        return [rank for rank in self._script[0].workers if rank not in self._script[0].joining]

    def ask(self, card: Card, give: Give) -> None:
        self._card = (card, give)

    def answer(self) -> Members:
        assert self._card is not None
        (card, give), self._card = self._card, None
        return self._use(*self._gather(card, give))

    def fail(self, error: OffbeatError) -> None:
        self.broken = True  # all members fail in the same call, so that nobody waits for this one

    def leave(self, departure: Departure) -> None:
        self._all.worker.leave(Departure(departure.text, PeerLost.__name__))

    def close(self) -> None:
        pass

    def _list(self, card: Card) -> list[Seat]:
        starts = not card.lineage and self._next < 0 and self._all.rank in self._starting
        workers: Sequence[int] = self._starting
        joining: Sequence[int] = ()
        if not starts:
            self._next += 1
            # A run that goes on after the script has the members of its last attempt.
            attempt = self._script[min(self._next, len(self._script) - 1)]
            workers, joining = attempt.workers, attempt.joining if self._next < len(self._script) else ()
        if self._all.rank not in workers:
            raise PeerLost(f"Simulated worker {self._all.rank} is gone by its script.")
        self._failures += self.broken and self._next >= len(self._script)
        if self._failures > _FAILURES:
            raise PeerLost("The last attempt of the script has lost a worker, and no other follows.")
        one: State = {"lineage": "", "rounds": -1}
        others: State = (
            {} if starts else {"lineage": card.lineage or "of the others", "rounds": max(card.rounds, 0)}
        )
        cards = [replace(card, prepared="", open=True, **(one if w in joining else others)) for w in workers]
        cards = [replace(own, entered=self._entered(w)) for w, own in zip(workers, cards, strict=True)]
        return [Seat(f"{w:04}", own, "", self._next) for w, own in zip(workers, cards, strict=True)]

    def _entered(self, worker: int) -> int:
        """The last attempt for which a worker has joined."""
        attempts = enumerate(self._script[: self._next + 1], start=1)
        return max((number for number, attempt in attempts if worker in attempt.joining), default=0)

    def _enough(self, seats: list[Seat]) -> bool:
        return True

    def _connect(self, decision: Decision) -> Communicator:
        return self._split([int(name) for name in decision.members.names])

    def _split(self, workers: Sequence[int]) -> Communicator:
        others = [[rank] for rank in range(self._all.size) if rank not in workers]
        return self._all.split([list(workers), *others])
