"""What an exchange is made of, shows, saves and loads: all of it but its rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.among import Group, Peers, World
from offbeat.base.clock import Clock, State
from offbeat.base.tensors import Gradients, Live
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure
from offbeat.engine.agreement import OWN, copy_state
from offbeat.engine.buckets import choose_sender
from offbeat.engine.extras import BufferRule, MomentRule, Payload
from offbeat.engine.guard import Guard
from offbeat.engine.part import (
    EVERYONE,
    Landing,
    Part,
    check_drift,
    check_reducer,
    check_update,
    find_unshared,
)
from offbeat.engine.report import Emit, Ledger
from offbeat.engine.round import Delay, Rhythm, Round
from offbeat.engine.sender import Sender
from offbeat.engine.weights import Tally
from offbeat.reduce import Mean, Reducer
from offbeat.update.update import Anchor, Replace, Update
from offbeat.when import Schedule

if TYPE_CHECKING:
    from offbeat.engine.commits import Commits


class ExchangeState(Part):
    """An exchange without its rounds, which `Exchange` adds."""

    def __init__(
        self,
        live: Live,
        *,
        when: Schedule,
        among: Peers | Group = None,
        reduce: Reducer | None = None,
        update: Update | None = None,
        delay: Delay = 0,
        buffers: BufferRule = "average",
        moments: MomentRule = "keep",
        drift: bool | None = None,
        guard: float | None = None,
    ) -> None:
        self.live, self.model, self.delay = live, live.model, delay
        self.when: Schedule = when
        self.peers: Peers = World(among) if isinstance(among, Group) else among
        self.common = isinstance(self.peers, World)  # whether all workers are in every round
        self.rhythm = Rhythm(when, delay)
        self.update: Update = check_update(update, delay, live, self.peers)
        self.reduce = check_reducer(reduce, self.update, live)
        self.drift = check_drift(drift, when, self.reduce, live)
        # Whether the live tensors themselves are sent, and replaced by their exact mean.
        self.plain = self.reduce == Mean() and self.update == Replace()
        in_place = self.plain and delay == 0 and not self.drift and not live.early
        self.payload = Payload(live, buffers, moments, in_place=in_place)
        self.sender: Sender = choose_sender(self.payload, self.update, self.reduce, delay, self.peers)
        self.ledger: Ledger = Ledger(when, drift=self.drift)
        self.index = 0
        self._states: dict[str, State] = {"update": self.update.init()}
        if not isinstance(self.update, Reducer):
            self._states["reduce"] = self.sender.init()
        self.guard = None if guard is None else Guard(guard, self.update, self.reduce, self.payload)
        if self.guard is not None:
            self._states["guard"] = self.guard.init()
        self._round: Round | None = None  # the one in flight
        self.commits: Commits | None = None  # in an elastic run
        self.landed_at, self.opened, self._rates_digest = -1, False, 0
        self._rates: tuple[float, ...] = ()  # learning rate of each live tensor in the last step
        self.tally = Tally(early=live.early, timed=when.timed, rated=self.update.rated)
        self.weighs = self.reduce.agrees and self.update.weighs
        self.unshared = find_unshared(self.update, self.reduce, delay, self.peers, when)

    def __repr__(self) -> str:
        guard = "" if self.guard is None else f", guard={self.guard.limit}"
        return (
            f"Exchange({self.live!r}, when={self.when!r}, among={self.peers!r}, reduce={self.reduce!r}, "
            f"update={self.update!r}, delay={self.delay!r}, buffers={self.payload.buffers.rule!r}, "
            f"moments={self.payload.moments.rule!r}, drift={self.drift}{guard})"
        )

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        self.index, self._everyone = index, self.peers.everyone
        self.ledger.bind(self._everyone, report)
        self.payload.moments.bind(optimizers)

    def _peers_at(self, round: int) -> Communicator:
        return self._everyone if self.common else self.peers.at(round)

    def communicators(self) -> list[Communicator]:
        self.outside = self.sender.connect(self._everyone)
        return [self._everyone, self._peers_at(self.rhythm.round)]

    def send_whole(self) -> None:
        """Send payloads whole, never in buckets. Call it before the first round."""
        self.sender = Sender(self.payload, self.update, self.reduce)
        self._states |= {"reduce": self.sender.init()} if "reduce" in self._states else {}

    @torch.no_grad()
    def open(self) -> None:
        """The first period begins: the update takes its anchor."""
        self.update.open(list(self.live.like().values()), self.payload.own, self._states["update"])
        if self.guard is not None:
            self.guard.note(self._states)
        self.opened = True

    @abstractmethod
    def snapshot_rates(self) -> None: ...

    @abstractmethod
    def land(self, clock: Clock) -> None: ...

    def flush_reports(self, *, wait: bool) -> None:
        self.ledger.flush(wait=wait)

    @property
    def _last_peers(self) -> Communicator:
        """The peers of the last round that began, or of the first round before it begins."""
        return self._peers_at(max(self.rhythm.round - 1, 0))

    @torch.no_grad()
    def shown(self) -> dict[str, Tensor]:
        if self.live.early:
            return {}
        shown = self.update.shown(self.live.tensors(), self.payload.own, self._states["update"])
        return {} if shown is None else dict(zip(self.live.names, shown, strict=True))

    @torch.no_grad()
    def flush(self, clock: Clock) -> None:
        self.sender.drain(self._states)
        if self._round is not None:
            self.snapshot_rates()
            # No step is left for gradients in flight: only the extras are applied.
            with self.live.aside() if isinstance(self.live, Gradients) else nullcontext():
                self.land(clock)
        self.ledger.flush(wait=True)
        self.sender.close(wait=True)
        if self.live.early:
            return
        round = Round(replace(clock, round=self.rhythm.round), self._last_peers, since=self.rhythm.began)
        with round.waiting():
            self.update.close(self.live.tensors(), self.payload.own, round.comm, self._states["update"])
        if round.comm.sent:
            self.ledger.emit(round.report())

    @property
    def anchor(self) -> Anchor | None:
        """The weights from which a period starts. None without an anchor, or before the first period."""
        flats = self._states["update"].get("anchor")
        workers = self._scope if self.update.anchors == "shared" else 0
        return None if flats is None else Anchor(self.payload.own.over(flats), workers)

    @property
    def _scope(self) -> int:
        """How many workers a landing covers."""
        return EVERYONE if self.common else self._last_peers.size

    @torch.no_grad()
    def follow(self, landing: Landing) -> None:
        """Unless a message is in flight: it belongs to the old anchor, which then stays."""
        if self._round is None and (anchor := self.anchor) is not None:
            anchor.follow(self.live.tensors(), landing.names, landing.workers)

    def leave(self, departure: Departure) -> None:
        super().leave(departure)
        self.sender.close(wait=False)

    def state_dict(self) -> State:
        in_flight = None if self._round is None else self._round.state_dict()  # first: arrivals change states
        own = {"states": copy_state(self.sender.rewind(self._states)), "air": in_flight}
        place = {"landed_at": self.landed_at, "opened": self.opened, "tally": self.tally.state_dict()}
        inside = {"rhythm": copy_state(self.rhythm.state_dict()), "ledger": self.ledger.state_dict()}
        if self.when.timed:  # workers are in the same round, after different steps
            return {"round": self.rhythm.round, OWN: {**place, **inside, **own}}
        # Groups of different sizes may hold different tensors: a worker alone in its group sends nothing.
        return {**place, **inside, **(own if self.common else {OWN: own})}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        state = cast(State, state[OWN]) if self.when.timed else state
        self.rhythm.load_state_dict(copy_state(state["rhythm"]))
        self.landed_at, self.opened = state["landed_at"], state["opened"]
        self.tally.load_state_dict(state["tally"])
        self.ledger.load_state_dict(state["ledger"])
        own = state.get(OWN, state)
        self.sender.check(own["states"])
        self.sender.drain(self._states)
        self._states, self._round = copy_state(own["states"]), None
        if own["air"] is not None:
            comm = self._peers_at(own["air"]["round"])
            self._round = Round.resume(own["air"], comm, self.payload.packed)
