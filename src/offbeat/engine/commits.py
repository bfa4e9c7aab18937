"""Rounds among workers that come and go: each is applied by all its members or by none, and repeated."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from offbeat.base.clock import Clock, State
from offbeat.base.errors import OffbeatError, PeerLost
from offbeat.base.tensors import Share
from offbeat.comm.changing import Card, Changing, Members
from offbeat.comm.communicator import Communicator, arrived
from offbeat.engine import agreement
from offbeat.engine.exchange import Exchange
from offbeat.engine.healing import Undo, adopt, capture, check_elastic, find_device, find_mean
from offbeat.engine.meetings import GONE_ON, INSIDE, Meetings
from offbeat.engine.report import logger
from offbeat.engine.round import Round

if TYPE_CHECKING:
    from offbeat.engine.synchronizer import Synchronizer

T = TypeVar("T")
_GLANCE = 0.001  # seconds between two looks whether the state has been read


class Rejoin(OffbeatError):
    """The others have gone on without this worker, which has received their state. A step adopts it."""

    def __init__(self, commits: Commits, state: State) -> None:
        super().__init__(GONE_ON)
        self._commits, self._state = commits, state

    def adopt(self) -> None:
        self._commits.adopt(self._state)


class Commits:
    """Commits the rounds of a run. A lineage names all of them: those who have the same have the same state.

    When a round has arrived, each member tells the others so, and applies it once all have. If one is lost
    before, nobody does: the survivors repeat the round. A worker that has told, but has not heard all others,
    learns from the next members whether one of them has applied it.
    """

    def __init__(self, run: Synchronizer, everyone: Changing) -> None:
        check_elastic(run.parts, everyone)
        self._run, self._everyone, self.meetings = run, everyone, Meetings(run, everyone, self)
        everyone.device = find_device(run.model)
        self.lineage, self.rounds, self._method = "", -1, ""
        self._entered = 0  # how many rounds were over when this worker came; one more if it has joined
        self._landed: dict[int, Round] = {}  # by part: those whose memory still holds the mean
        self.consensus: dict[str, torch.Tensor] = {}  # the last means of parts without an anchor, by name
        self.ready: Members | None = None  # the next members, if they are known
        self.asked = False  # for the next members, who are not known yet
        self._undo: dict[int, Undo] = {}  # by part, while its round is in the air
        self._waited = 0.0  # seconds for the next members
        self.joined = False  # whether this worker has received a state, and the gradients of its step are old
        # Held while the state of the run may change. Who sends it to a worker that joins waits for it.
        self._busy, self._wanted, self._over = threading.Lock(), False, False
        self._busy.acquire()
        self._exchanges = [part for part in run.parts if isinstance(part, Exchange)]
        for part in self._exchanges:
            part.send_whole()
            part.payload.renew()
            part.commits = self

    def ask(self, prepared: str = "", place: float = math.inf, *, can_heal: bool = False) -> None:
        if not self._method:
            self._method = _extend("\n".join(agreement.describe_run(self._run.method, self._run.model)), "")
        own = (self._run.method, self.lineage, self.rounds, self._entered, prepared, place, can_heal)
        self._everyone.ask(Card(self._method, *own), self._give)
        self.asked = True

    def answer(self) -> Members:
        """Wait for the next members. Meanwhile this worker's state may be read."""
        self.asked, before = False, self._everyone.members.key
        self._busy.release()
        try:
            members = self._everyone.answer()
        finally:
            self._busy.acquire()
        for part in self._exchanges if members.key != before else ():
            part.ledger.abandon()
        self._run._follow_members(self._everyone)
        return members

    def _give(self) -> State | None:
        """Return the state for a worker that joins, between two changes of it. Called in another thread."""
        self._wanted = True
        with self._busy:
            self._wanted = False
            return None if self._over else capture(self._run, self)

    def poll(self) -> None:
        """The state does not change now: let it be read, if someone needs it."""
        while self._wanted:
            self._busy.release()
            time.sleep(_GLANCE)
            self._busy.acquire()

    def join(self) -> bool:
        """Once: become a member. Return whether this worker has the state of the run now.

        The first members begin with the weights of rank 0. Those that have loaded a checkpoint have them.
        """
        if self.rounds >= 0:
            return True
        run, everyone = self._run, self._everyone
        run.agree()
        if run._started:
            self.lineage, self.rounds = _extend("load", f"{run._run} {run.steps}"), count_landed(run)
            self._entered = self.rounds
        while True:
            self.ask()
            members = self.answer()
            if members.state is not None:
                self.ready = members
                self.adopt(members.state)
                return True
            if not members.broken and self.rounds >= 0 and members.lineage == self.lineage:
                break
            if members.broken or not members.starts:
                continue
            if not self.meetings.start():
                continue
            self.lineage, self.rounds = _extend("start", members.key), 0
            run._run, run._started = agreement.digest(self.lineage), True
            break
        logger.info("%r on %d workers starts at step %d", run, everyone.size, run.steps)
        self.keep()
        self.ask(can_heal=self._heals(None))
        return True

    def adopt(self, state: State) -> None:
        """Continue from the state of another worker, and enter the next round with it."""
        self.lineage, self.rounds, self.joined = state["lineage"], state["rounds"], True
        self._entered = self.rounds + 1  # younger than those who began here
        if self.ready is not None:
            self.ready = replace(self.ready, lineage=self.lineage, state=None)
        adopt(self._run, self, state)

    def find_consensus(self) -> dict[str, torch.Tensor]:
        """Return the last means of the parts without an anchor, by name."""
        for part in self._run.parts:
            if isinstance(part, Exchange) and not part.live.early and part.index in self._landed:
                self.consensus |= find_mean(part, self._landed.pop(part.index))
        return self.consensus

    def keep(self) -> None:
        """Note the weights of parts without an anchor, which are the consensus now."""
        self._landed.clear()
        for part in self._run.parts:
            if isinstance(part, Exchange) and not part.live.early and part.update.anchors == "none":
                self.consensus |= {name: x.detach().clone() for name, x in part.live.like().items()}

    def _heals(self, part: Exchange | None) -> bool:
        """Whether a worker that joins now can continue from the state: not while gradients are averaged."""
        parts = [other for other in self._run.parts if isinstance(other, Exchange)]
        quiet = all(other is part or other._round is None for other in parts)
        late = not any(other.live.early for other in parts) if part is None else not part.live.early
        return quiet and late and not self._run.finished

    def gather(self) -> Communicator:
        """A round begins: return the communicator of its members."""
        start = self._everyone.now()
        while True:
            if self.ready is None and not self.asked:
                self.ask()  # the last members were not all, or were ahead, and could not give their state yet
            members, self.ready = self.ready or self.answer(), None
            if members.lineage == self.lineage:
                break
            if members.state is not None:
                self.ready = members
                raise Rejoin(self, members.state)
        self._everyone.members, self._waited = members, max(0.0, self._everyone.now() - start)
        return self._everyone.comm

    def send(self, part: Exchange, round: Round, share: Share | None) -> None:
        """Send this worker's share. A worker that is lost meanwhile breaks the round, which lands anyway."""
        members = self._everyone.members
        round.mean, round.members, round.broken = arrived(part.payload.packed), members.names, members.broken
        round.entered = members.entered
        for sent, received in self._count_healed():
            round.comm.sent, round.comm.received = round.comm.sent + sent, round.comm.received + received
        round.waited, self._waited = round.waited + self._waited, 0.0
        if share is None and part.live.early:
            share = (part.live.notes(), part.live.tensors())
        changed = {name: state for name, state in part._states.items() if name != "update"}
        kept = share if part.live.early else None
        self._undo[part.index] = Undo(agreement.copy_state(changed), part.tally.state_dict(), kept)
        with self.breaking(round):
            if not round.broken:
                part.send(round, share)
        if round.broken:  # perhaps before all weights were known; a repeat puts them back
            part.tally.restart(round.clock.step)

    @contextmanager
    def breaking(self, round: Round) -> Iterator[None]:
        """If a worker is lost inside, the round is broken: it is repeated when it would land."""
        try:
            yield
        except PeerLost as error:
            logger.warning("%s", error)
            round.broken = True
            self._everyone.fail(error)

    def settle(self, part: Exchange, clock: Clock) -> str:
        """Repeat the round in the air until it has arrived at all members. Return the lineage with it."""
        while True:
            round, prepared = part._round, ""
            assert round is not None
            with self.breaking(round), round.phase("offbeat.land"):
                if not round.broken:
                    round.wait()
                    prepared = _extend(self.lineage, f"{part.index} {self._everyone.members.key}")
                    with round.waiting():
                        round.comm.tell([1]).wait()
            whole, arrived_all = self._everyone.unite(not round.broken, bool(prepared))
            if not whole:
                self._everyone.fail(PeerLost(INSIDE))
                round.broken, prepared = True, prepared if arrived_all else ""
                with round.waiting():
                    members = self._ask_again(prepared)
                if not prepared or members.lineage != prepared:
                    self._repeat(part, clock, round)
                    continue
                self.ready = members
            if part.plain:
                self._landed[part.index] = round  # its memory holds the mean until the next round
            elif part.update.anchors == "none" and not part.live.early:
                self.consensus |= find_mean(part, round)
            return prepared

    def _ask_again(self, prepared: str) -> Members:
        """Ask, until all who answer have the rounds of this worker, or one more that it has prepared."""
        while True:
            self.ask(prepared)
            members = self.answer()
            if members.state is not None:
                self.ready = members
                raise Rejoin(self, members.state)
            if not members.broken and members.lineage in (self.lineage, prepared):
                return members

    def _repeat(self, part: Exchange, clock: Clock, old: Round) -> None:
        """Put back what sending has changed, and send again, what this worker has now, to the members."""
        undo = self._undo[part.index]
        part._states |= undo.states
        part._states["update"].pop("sent", None)
        part.tally.put_back(undo.tally)
        part.payload.renew()  # messages of the last attempt may still write into the memory of the old one
        clock = replace(
            old.clock, step=clock.step, lr=clock.lr, workers=self._everyone.size, rates=part._rates
        )
        round = part._round = Round(clock, self._everyone.comm, since=old.since)
        round.waited, round.began, round.repeats = old.waited, old.began, old.repeats + 1
        old.comm.move(round.comm)
        logger.info("Round %d is repeated among %d workers", clock.round, self._everyone.size)
        self.send(part, round, undo.share)

    def commit(self, part: Exchange, round: Round, lineage: str) -> None:
        """The round has been applied: ask for the next members, unless they are known."""
        self.lineage, self.rounds = lineage, self.rounds + 1
        del self._undo[part.index]
        if self.ready is None:
            self.ask(can_heal=self._heals(part))

    def _count_healed(self) -> Iterator[tuple[int, int]]:
        """Take the bytes of the states that were passed on since the last call: sent and received."""
        while self._everyone.healed:
            yield self._everyone.healed.popleft()

    def close(self, *, finished: bool = False) -> None:
        """This worker takes part in no further round."""
        if not self._over:
            self._over, self._everyone.finished = True, finished
            self._busy.release()
            self._everyone.close()
            comm = self._run._comm
            for sent, received in self._count_healed():
                comm.sent, comm.received = comm.sent + sent, comm.received + received
            self._run._costs.count(comm)


def count_landed(run: Synchronizer) -> int:
    """How many rounds a checkpoint has applied: comparable with those of runs under way."""
    return sum(p.rhythm.round - p.rhythm.in_air for p in run.parts if isinstance(p, Exchange))


def _extend(lineage: str, more: str) -> str:
    return hashlib.sha256(f"{lineage} {more}".encode()).hexdigest()[:16]
