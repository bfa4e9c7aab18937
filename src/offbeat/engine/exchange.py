"""One kind of tensor × five answers: when, with whom, what is sent, how applied, behind how much compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.among import Group, Peers, World
from offbeat.base.clock import Clock, State
from offbeat.base.tensors import Gradients, Live, Share
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure
from offbeat.engine import messages
from offbeat.engine.agreement import OWN, copy_state
from offbeat.engine.arrival import Arrival, is_plain
from offbeat.engine.buckets import choose_sender
from offbeat.engine.extras import BufferRule, MomentRule, Payload
from offbeat.engine.optimizers import read_rates
from offbeat.engine.part import Landing, Part, check_drift, check_reducer, check_update, find_unshared
from offbeat.engine.report import Emit, Ledger
from offbeat.engine.round import Delay, Rhythm, Round
from offbeat.engine.sender import Sender
from offbeat.engine.weights import Tally
from offbeat.reduce import Reducer
from offbeat.reduce.code import Staged
from offbeat.update.update import Anchor, Update
from offbeat.when import Schedule

if TYPE_CHECKING:
    from offbeat.engine.commits import Commits


class Exchange(Part):
    """Tensors that are reduced among peers from time to time.

    `delay` is the number of local steps between sending and applying. With "round", or if the next round
    comes first, the mean lands just before that. Gradients: each step sends its own and uses the mean that
    lands in it, or its own if nothing lands; a delay costs one more copy of them. `buffers` and `moments` say
    what happens to buffers and the optimizer's moments in a round. `drift=False` saves a pass over the model.
    `guard=3.0` leaves a worker out of a round: see `Guard`.

        Exchange(params(model), when=Every(8), update=Correct(), delay=4)
    """

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
        self.rhythm = Rhythm(when, delay)
        self.update: Update = check_update(update, delay, live, self.peers)
        self.reduce = check_reducer(reduce, self.update, live)
        self.drift = check_drift(drift, when, self.reduce, live)
        in_place = is_plain(self.update, self.reduce) and delay == 0 and not self.drift and not live.early
        self.payload = Payload(live, buffers, moments, in_place=in_place)
        self.sender: Sender = choose_sender(self.payload, self.update, self.reduce, delay, self.peers)
        self.index, self.ledger = 0, Ledger(when, drift=self.drift)
        self._states: dict[str, State] = {"update": self.update.init()}
        if not isinstance(self.update, Reducer):
            self._states["reduce"] = self.sender.init()
        self.arrival = Arrival(self.payload, self.update, self.reduce, guard, delay != 0, self.drift)
        self._states |= self.arrival.init()
        self._round: Round | None = None  # the one in the air
        self.commits: Commits | None = None  # if workers come and go
        self.landed_at, self.opened, self._rates_digest = -1, False, 0
        self._rates: tuple[float, ...] = ()  # of every live tensor in the last step, that of its own group
        self.tally = Tally(early=live.early, timed=when.timed, rated=self.update.rated)
        self.weighs = self.reduce.agrees and self.update.weighs
        self.unshared = find_unshared(self.update, self.reduce, delay, self.peers, when)

    def __repr__(self) -> str:
        return (
            f"Exchange({self.live!r}, when={self.when!r}, among={self.peers!r}, reduce={self.reduce!r}, "
            f"update={self.update!r}, delay={self.delay!r}, buffers={self.payload.buffers.rule!r}, "
            f"moments={self.payload.moments.rule!r}, drift={self.drift}{self.arrival})"
        )

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        self.index, self._everyone = index, self.peers.everyone
        self.ledger.bind(self._everyone, report)
        self.payload.moments.bind(optimizers)

    def _peers_at(self, round: int) -> Communicator:
        return self._everyone if isinstance(self.peers, World) else self.peers.at(round)

    def communicators(self) -> list[Communicator]:
        self.outside = self.sender.connect(self._everyone)
        return [self._everyone, self._peers_at(self.rhythm.round)]

    def send_whole(self) -> None:
        """Send each payload as a whole when its round begins. Call it before the first round."""
        self.sender = Sender(self.payload, self.update, self.reduce)
        self._states |= {"reduce": self.sender.init()} if "reduce" in self._states else {}

    def plan(self, clock: Clock) -> None:
        self.ledger.observe(clock.observed)
        self.tally.add(clock)
        rhythm = self.rhythm
        if rhythm.planned is None:
            rhythm.plan(self.ledger.update(clock, opened=self.opened))
            if (rhythm.planned is not None or rhythm.running) and not self.opened:
                self.open()
                self.tally.restart(clock)  # what the warm-up did does not count
        self.tally.idle = rhythm.planned is None and not rhythm.running
        if clock.step + 1 in (rhythm.planned, rhythm.lands):
            self.snapshot_rates()

    @torch.no_grad()
    def open(self) -> None:
        """The first period begins: the update takes its anchor."""
        self.update.open(list(self.live.like().values()), self.payload.own, self._states["update"])
        self.arrival.note_start(self._states)
        self.opened = True

    def snapshot_rates(self) -> None:
        """Note the learning rates of the coming step: a scheduler may step before the round begins."""
        parameters = () if self.live.early else self.live.parameters  # gradients have no use for the rates
        self._rates_digest, self._rates = read_rates(self.payload.moments.optimizers, parameters)

    def before(self, clock: Clock) -> bool:
        if isinstance(self.live, Gradients):
            self.tick(replace(clock, step=clock.step + 1))
            if not self.live.own and self.landed_at <= clock.step:
                torch._foreach_zero_(self.live.tensors())
        return True

    def after(self, clock: Clock) -> Landing | None:
        if self.live.early:
            return None
        self.tick(clock)
        return Landing(frozenset(self.live.names), self._scope) if self.landed_at == clock.step else None

    def tick(self, clock: Clock) -> None:
        """Do what the rhythm says for this step: land, advance, begin, and land at once without a delay."""
        if self.ledger.open:
            self.ledger.flush(wait=False)
        if self.tally.idle and not self.rhythm.in_air:
            self.ledger.mean_loss()  # dropped: the step belongs to no period
        acts = self.rhythm.acts(clock.step)
        share: Share | None = None
        if self.delay and "begin" in acts and isinstance(self.live, Gradients):
            share = self.live.take(copy="land" in acts)  # first, because what lands overwrites them
        for act in acts:
            if act == "begin":
                self.begin(clock, share)
            else:
                self.land(clock) if act == "land" else self.advance()
        if "begin" in acts:
            self.arrival.note_start(self._states, self._round)

    @torch.no_grad()
    def begin(self, clock: Clock, share: Share | None = None) -> None:
        """Send this worker's share of the round: the live tensors, unless it was taken earlier."""
        rhythm, commits = self.rhythm, self.commits
        comm = self._peers_at(rhythm.round) if commits is None else commits.gather()
        clock = replace(clock, round=rhythm.round, workers=comm.size, rates=self._rates)
        round = self._round = Round(clock, comm, since=rhythm.began)
        self.ledger.begin(clock.step - rhythm.began)
        if commits is None:
            messages.send(self, round, share)
        else:
            commits.send(self, round, share)
        rhythm.begin(clock.step, 1 + len(round.mean.stages) if isinstance(round.mean, Staged) else 1)

    @torch.no_grad()
    def advance(self) -> None:
        """Send the reducer's next message, if it has one."""
        assert self._round is not None
        with nullcontext() if self.commits is None else self.commits.breaking(self._round):
            self._round.advance()

    @torch.no_grad()
    def land(self, clock: Clock) -> None:
        """Wait for the round's messages and apply them."""
        lineage = None if self.commits is None else self.commits.settle(self, clock)
        round, self._round = self._round, None
        assert round is not None
        self.rhythm.land()
        with round.phase("offbeat.land"):
            round.wait()
            clock = replace(clock, round=round.clock.round, workers=round.comm.size, rates=self._rates)
            distances = self.arrival.apply(round, clock, self._states)
        if self.sender.parts:
            self.sender.landed(clock, self.rhythm, self._states)
        stepped = clock.step > self.landed_at
        self.landed_at = self.landed_at if round.void else clock.step
        self.tally.land(clock, void=round.void, all_dry=round.all_dry)
        self.ledger.close(round, *distances, stepped=stepped, late=self.delay != 0)
        if self.commits is not None and lineage is not None:
            self.commits.commit(self, round, lineage)

    def flush_reports(self, *, wait: bool) -> None:
        self.ledger.flush(wait=wait)

    @property
    def _last_peers(self) -> Communicator:
        """Those of the last round that began; before the first round, those of the first."""
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
            # No step is left for gradients in the air: only the extras are applied.
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
        """The weights that workers set out from; None without an anchor, or before the first period."""
        flats = self._states["update"].get("anchor")
        workers = self._scope if self.update.anchors == "shared" else 0
        return None if flats is None else Anchor(self.payload.own.over(flats), workers)

    @property
    def _scope(self) -> int:
        """How many workers a landing covers. Everyone counts for more than any group of that size."""
        return sys.maxsize if isinstance(self.peers, World) else self._last_peers.size

    @torch.no_grad()
    def follow(self, landing: Landing) -> None:
        """A message in the air still belongs to the old anchor, which then stays."""
        if self._round is None and (anchor := self.anchor) is not None:
            anchor.follow(self.live.tensors(), landing.names, landing.workers)

    def leave(self, departure: Departure) -> None:
        super().leave(departure)
        self.sender.close(wait=False)

    def state_dict(self) -> State:
        air = None if self._round is None else self._round.state_dict()  # first: arrivals change states
        own = {"states": copy_state(self.sender.settled(self._states)), "air": air}
        place = {"landed_at": self.landed_at, "opened": self.opened, "tally": self.tally.state_dict()}
        inside = {"rhythm": copy_state(self.rhythm.state_dict()), "ledger": self.ledger.state_dict()}
        if self.when.timed:  # workers are in the same round, after different steps
            return {"round": self.rhythm.round, OWN: {**place, **inside, **own}}
        # Groups of different sizes may hold different tensors: a worker alone in its group sends nothing.
        return {**place, **inside, **(own if isinstance(self.peers, World) else {OWN: own})}

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
