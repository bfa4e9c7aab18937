"""One kind of tensor and five answers: when, with whom, what is sent, how it is applied, with what delay."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from offbeat.base.clock import Clock
from offbeat.base.tensors import Gradients, Share
from offbeat.comm.communicator import arrived
from offbeat.engine.exchange_state import ExchangeState
from offbeat.engine.optimizers import read_rates
from offbeat.engine.part import EVERYONE, Landing
from offbeat.engine.round import Round
from offbeat.engine.weights import NO_WEIGHT
from offbeat.reduce.code import Staged
from offbeat.reduce.rounded import send

Distances = tuple[float | None, float | None]


class Exchange(ExchangeState):
    """Reduces tensors among peers from time to time.

    `delay` is the number of local steps between sending and applying. With "round", or if the next round
    comes first, the mean lands just before that. Gradients: each step sends its own and uses the mean that
    lands in it, or its own if nothing lands; a delay costs one more copy of them. `buffers` and `moments` say
    what happens to buffers and the optimizer's moments in a round. `drift=False` saves a pass over the model.
    `guard=3.0` leaves outliers out of a round: see `Guard`.

        Exchange(params(model), when=Every(8), update=Correct(), delay=4)
    """

    def plan(self, clock: Clock) -> None:
        rhythm, tally = self.rhythm, self.tally
        if clock.observed:
            self.ledger.observe(clock.observed)
        if tally.special or clock.dry or clock.samples is not None:
            tally.add(clock)
        if rhythm.planned is None:
            rhythm.plan(self.ledger.update(clock, opened=self.opened))
            if (rhythm.planned is not None or rhythm.running) and not self.opened:
                self.open()
                tally.restart(clock.step)  # steps of a warm-up do not count
                tally.add(clock)
        tally.idle = rhythm.planned is None and not rhythm.running
        if clock.step + 1 in (rhythm.planned, rhythm.lands):
            self.snapshot_rates()

    def snapshot_rates(self) -> None:
        """Note the learning rates of the coming step: a scheduler may step before the round begins."""
        parameters = self.live.parameters if self.update.rated else ()
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
        if self.landed_at != clock.step:
            return None
        return Landing(frozenset(self.live.names), EVERYONE if self.common else self._last_peers.size)

    def tick(self, clock: Clock) -> None:
        """Do what the rhythm says for this step: land, advance, begin, and land at once without a delay."""
        if self.ledger.open:
            self.ledger.flush(wait=False)
        if self.tally.idle and not self.rhythm.in_air:
            self.ledger.mean_loss()  # the losses are dropped: the step belongs to no period
        acts = self.rhythm.acts(clock.step)
        share: Share | None = None
        if self.delay and "begin" in acts and isinstance(self.live, Gradients):
            share = self.live.take(copy="land" in acts)  # first, because a landing overwrites them
        for act in acts:
            if act == "begin":
                self.begin(clock, share)
            else:
                self.land(clock) if act == "land" else self.advance()
        if self.guard is not None and "begin" in acts:
            self.guard.note(self._states, self._round)

    @torch.no_grad()
    def begin(self, clock: Clock, share: Share | None = None) -> None:
        """Send this worker's share of the round: the live tensors, unless it was taken earlier."""
        rhythm, commits = self.rhythm, self.commits
        if commits is not None:
            comm = commits.gather()
        else:
            comm = self._everyone if self.common else self.peers.at(rhythm.round)
        clock = replace(clock, round=rhythm.round, workers=comm.size, rates=self._rates)
        round = self._round = Round(clock, comm, since=rhythm.began)
        if self.ledger.watch is not None:
            self.ledger.watch.begin(self._everyone.now(), clock.step - rhythm.began)
        if commits is None:
            self.send(round, share)
        else:
            commits.send(self, round, share)
        rhythm.begin(clock.step, 1 + round.mean.stages if isinstance(round.mean, Staged) else 1)

    def send(self, round: Round, share: Share | None) -> None:
        """Compare the workers by their headers, then send the live tensors and what travels with them."""
        payload, sender, tally, step = self.payload, self.sender, self.tally, round.clock.step
        with round.phase("offbeat.begin"):
            moments, digest = payload.moments.collect(step) if payload.moments.travel else ({}, 0)
            weight, flags, factor = NO_WEIGHT, 0, 1.0
            if special := tally.special or self.guard is not None:
                out = self.guard is not None and tally.count_steps(step) and self.guard.judge(self._states)
                weight, flags = tally.word(step, int(out))
            weight = sender.check_unchanged(round, weight) if sender.parts else weight
            waited = self.totals.seconds_waited
            place = (self.index, self._rates_digest, self._everyone.rank)
            heads = round.compare(*place, digest, weight, waited, flags)
            if special:
                factor = round.weigh(weight, flags)
                tally.restart(step)
            tally.since = step
            round.mean = arrived(payload.packed)
            if round.void:
                return
            moments = payload.moments.choose(moments, heads, round) if payload.moments.travel else {}
            notes, live = share or (self.live.notes() if self.live.early else {}, self.live.tensors())
            if len(payload.packed.names) > len(live):
                payload.pack_extras(notes)
            if self.plain and factor == 1 and not sender.parts and payload.packed.names:
                round.mean = send(payload.packed, round.comm, live)
            elif payload.packed.names:  # otherwise it is a round of moments alone
                round.mean = sender.start(round, (notes, live), factor, heads, self._states)
            round.messages.append(round.mean)
            if payload.has_extras:
                payload.send_extras(moments, round, factor, late=self.delay != 0)

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
            distances = self._apply(round, clock)
        if self.sender.parts:
            self.sender.prepare_next(clock, self.rhythm, self._states)
        stepped = clock.step > self.landed_at
        self.landed_at = self.landed_at if round.void else clock.step
        if not round.alike:
            self.tally.land(clock.step, void=round.void, all_dry=round.all_dry)
        self.ledger.close(round, *distances, stepped=stepped, late=self.delay != 0)
        if self.commits is not None and lineage is not None:
            self.commits.commit(self, round, lineage)

    def _apply(self, round: Round, clock: Clock) -> Distances:
        """Apply what has arrived. Return |x − x̄|² and the squared length of the change, where known."""
        mean, payload, live = round.take(), self.payload, self.live
        if round.void:
            return None, None
        if self.reduce.remembers:
            self.sender.reweigh(self._states, round.factor)
        own, notes, buffers = mean.cut(*payload.lengths)
        if round.dropped:
            distances: Distances = (0.0, None)
            assert self.guard is not None
            self.guard.land(own, clock, self._states, round)
        elif self.plain and self.drift:
            distances = (own.write_and_measure(live.tensors()),) * 2
        else:
            tensors, state, distances = live.tensors(), self._states["update"], (None, None)
            if self.drift and not self.reduce.lossy:
                distances = self.update.distances(tensors, own, state)
            self.update.incoming(tensors, own, clock, state)
        if live.early:
            # With a delay or a residual, the mean may be nonzero where no worker has a gradient now.
            live.land_notes(notes.views, late=self.reduce.remembers or self.delay != 0)
        if payload.has_extras and not round.nobody:
            payload.land_extras(buffers.views, round)
        if round.dropped and self.guard is not None:
            self.guard.forget(round)
        return distances
