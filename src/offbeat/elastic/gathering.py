"""What every kind of membership does with the workers that have asked: connect, and heal those that join."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace

from offbeat.base.clock import State
from offbeat.base.errors import OffbeatError, PeerLost, RunFinished
from offbeat.comm.changing import Card, Changing, Give, Members, unite
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure
from offbeat.comm.solo import Solo
from offbeat.elastic.decision import FINISHED, Decision, Seat, decide, drop_finished
from offbeat.elastic.wire import Unreadable, receive_state, send_state

logger = logging.getLogger("offbeat")


class Gathering(Changing):
    """A communicator whose members are those that ask for the next round."""

    most_bytes = 2**40  # of the tensors in a state

    def __init__(self, name: str, alone: Communicator) -> None:
        super().__init__(alone)
        self.name, self.members = name, Members((name,))
        self.broken = True  # there are no connections, or they have failed
        self._attempt = 0
        self.beside: Communicator | None = None  # as `inside`, for the thread that asks for members

    @abstractmethod
    def _list(self, card: Card) -> list[Seat]:
        """Wait for all workers that ask for the next members, this one included."""

    @abstractmethod
    def _connect(self, decision: Decision) -> Communicator:
        """Connect to the members."""

    @abstractmethod
    def _enough(self, seats: list[Seat]) -> bool:
        """Whether so many workers may go on. If not, wait a moment."""

    def _gather(self, card: Card, give: Give) -> tuple[Communicator, Members]:
        """Ask until this worker is a member, is connected to the others, and has the state of the run.

        If one of its processes cannot connect, or receives no state, none of them has.
        """
        if self.beside is None:
            return self._find(card, give)
        try:
            comm, members = self._find(card, give)
        except OffbeatError:
            unite(self.beside, False)
            raise
        if not unite(self.beside, not members.broken)[0] and not members.broken:
            if comm is not self.comm:
                _drop(comm, Departure("lost a process", PeerLost.__name__))
            return Solo(), replace(members, broken=True, state=None)
        return comm, members

    def _find(self, card: Card, give: Give) -> tuple[Communicator, Members]:
        while True:
            self._attempt += 1
            seats = drop_finished(self._list(card), self.name)
            if not self._enough(seats):
                continue
            decision = decide(seats, self.name)
            if self.name not in decision.members.names:
                continue  # the others cannot take it in now: they ask again after their round
            if decision.keeps:
                return self.comm, decision.members
            comm: Communicator | None = None
            try:
                comm = self._connect(decision)
                return comm, replace(decision.members, state=self._heal(decision, comm, give))
            except OffbeatError as error:
                over = isinstance(error, RunFinished)
                if comm is not None:
                    _drop(comm, Departure(str(error), (RunFinished if over else PeerLost).__name__))
                if over or isinstance(error, Unreadable):  # it would break every round of the others
                    raise
                logger.warning("%s: these members have lost a worker: %s", self.name, error)
                return Solo(), replace(decision.members, broken=True)

    def _heal(self, decision: Decision, comm: Communicator, give: Give) -> State | None:
        """Give the state to those that this worker heals, or receive it."""
        names, received = decision.members.names, None
        for joining, donor in decision.donors.items():
            if self.name not in (joining, donor):
                continue
            pair = sorted((names.index(joining), names.index(donor)), key=lambda r: names[r] != donor)
            others = [[rank] for rank in range(len(names)) if rank not in pair]
            between = comm.split([pair, *others])
            if self.name == joining:
                received, size = receive_state(between, self.most_bytes, self.device)
                self.healed.append((0, size))
            elif (state := give()) is None:
                raise RunFinished(FINISHED) if self.finished else PeerLost(f"Worker {donor} has left.")
            else:
                logger.info("%s sends its state to %s", donor, joining)
                self.healed.append((send_state(state, between), 0))
        return received

    def _use(self, comm: Communicator, members: Members) -> Members:
        self.broken = members.broken
        self._replace(comm, members)
        return members

    def fail(self, error: OffbeatError) -> None:
        if not self.broken:
            _drop(self.comm, Departure(str(error), PeerLost.__name__))
        self.broken = True

    def leave(self, departure: Departure) -> None:
        """To the others it makes no difference why: they go on."""
        self.fail(PeerLost(f"Worker {self.name} {departure.text}."))
        self.close()


def _drop(comm: Communicator, departure: Departure) -> None:
    """Tell the others that this worker sends nothing more, and close the connections to them."""
    comm.worker.leave(departure)
    comm.worker.disconnect()
