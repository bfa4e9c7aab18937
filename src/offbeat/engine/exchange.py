"""One kind of tensor × five answers: when, with whom, what is sent, how applied, behind how much compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.among import Peers, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Gradients, Live, Share
from offbeat.comm.communicator import Communicator
from offbeat.comm.metered import Metered
from offbeat.engine.checkpoint import copied
from offbeat.engine.extras import BufferRule, MomentRule, send_mean
from offbeat.engine.handshake import ROUND, compare_headers, header
from offbeat.engine.ledger import Ledger
from offbeat.engine.optimizers import mark, rates
from offbeat.engine.part import Part
from offbeat.engine.payload import Payload
from offbeat.engine.report import Report
from offbeat.engine.round import Round, halfway, naming, profiled, soonest
from offbeat.reduce import Mean, Reducer
from offbeat.update.update import Replace, Update
from offbeat.when import Schedule

Delay = int | Literal["round"]
_Distances = tuple[float | None, float | None]


class Exchange(Part):
    """Tensors that are reduced among peers from time to time.

    `delay` is the number of local steps between sending and applying; with "round" the mean lands just before
    the next round. A message still in the air when the next round begins always lands just before it.

    Late gradients: each step sends its own gradients and uses the mean that lands in it. A step in which
    nothing lands, such as the first, uses its own. This costs one more copy of the gradients.

    `buffers` and `moments` say what becomes of the model's buffers and the optimizer's moments in the same
    round. `drift=False` spares the pass over the model that measures it.

        Exchange(params(model), when=Every(8), update=Correct(), delay=4)
    """

    def __init__(
        self,
        live: Live,
        *,
        when: Schedule,
        among: Peers | Communicator | None = None,
        reduce: Reducer | None = None,
        update: Update | None = None,
        delay: Delay = 0,
        buffers: BufferRule = "average",
        moments: MomentRule = "keep",
        drift: bool | None = None,
    ) -> None:
        self.live, self.when, self.delay = live, when, delay
        self.model = live.model
        self.peers: Peers = World(among) if among is None or isinstance(among, Communicator) else among
        if reduce is not None and not isinstance(reduce, Reducer):
            raise TypeError(f"reduce={reduce!r}: a reducer is needed, such as Mean().")
        if update is not None and not isinstance(update, Update):
            raise TypeError(
                f"update={update!r}: an update is needed, such as Replace() or Outer(SGD(lr=0.7))."
            )
        self.update: Update = Replace() if update is None else update
        _check_groups(self.update, self.peers)
        self.reduce = _reducer(reduce, self.update, live)
        self.drift = self._measured(drift)
        plain = self.reduce == Mean() and self.update == Replace()
        in_place = plain and delay == 0 and not self.drift and not live.early
        self.payload = Payload(live, buffers, moments, in_place=in_place)
        self.payload.late = self.reduce.remembers or delay != 0
        _check_delay(delay, when)
        if live.early and self.update.anchored:
            raise ValueError(
                f"update={self.update!r} with {live!r}: it needs an anchor, which gradients do not have; use "
                "Replace() or Correct(), or params(model)."
            )
        if delay and isinstance(self.update, Reducer):
            raise ValueError(
                f"delay={delay!r} with update={self.update!r}: what is done in the meantime would be lost."
            )
        self._index, self._ledger = 0, Ledger()
        self._states: dict[str, State] = {"when": self.when.init(), "update": self.update.init()}
        if not isinstance(self.update, Reducer):
            self._states["reduce"] = self.reduce.init()
        self._plan: int | None = None
        self._round, self._began_at, self._landed_at = 0, 0, -1
        self._opened = False
        self._flight: Round | None = None
        self._rates: tuple[float, ...] = ()  # of every live tensor in the last step, that of its own group
        self._marks = 0

    def _measured(self, drift: bool | None) -> bool:
        """Whether rounds tell drift or loss. What lost something on its way tells no drift."""
        needs, lossy = self.when.needs, self.reduce.lossy
        if lossy and (drift or "drift" in needs):
            wish = "drift=True" if drift else repr(self.when)
            raise ValueError(f"{wish} with reduce={self.reduce!r}, which loses what tells drift: use Mean().")
        if needs and drift is False:
            raise ValueError(
                f"drift=False with {self.when!r}: it decides by what rounds tell; leave drift out."
            )
        return bool(needs) or not (self.live.early or lossy) if drift is None else drift

    def __repr__(self) -> str:
        return (
            f"Exchange({self.live!r}, when={self.when!r}, among={self.peers!r}, reduce={self.reduce!r}, "
            f"update={self.update!r}, delay={self.delay!r}, buffers={self.payload.buffers.rule!r}, "
            f"moments={self.payload.moments.rule!r}, drift={self.drift})"
        )

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        self._index, self._ledger.emit = index, report
        self.payload.moments.bind(optimizers)

    def communicators(self) -> list[Communicator]:
        return [self.peers.everyone, self.peers.at(self._round)]

    def observe(self, loss: float | Tensor) -> None:
        if "loss" in self.when.needs:
            self._ledger.observe(loss)

    def plan(self, clock: Clock) -> None:
        if self._plan is None:
            self._ask(clock)
        if clock.step + 1 == self._plan or (self._flight and clock.step + 1 == self._flight.due):
            self._look()

    def _look(self) -> None:
        """See the learning rates of the coming step: a scheduler may step before the round begins."""
        optimizers = self.payload.moments.optimizers
        self._marks = mark(optimizers)
        # Gradients have no use for the rates.
        self._rates = () if self.live.early else rates(self.live.parameters, optimizers)

    def before(self, clock: Clock) -> bool:
        if self.live.early:
            self.tick(replace(clock, step=clock.step + 1))
        return True

    def after(self, clock: Clock) -> None:
        if not self.live.early:
            self.tick(clock)

    def tick(self, clock: Clock) -> None:
        """Land what is due, then begin the round if this is its step, and land it at once without a delay.

        What is in the air lands at the latest when the next round begins. Gradients to be sent are taken
        first, because what lands overwrites them.
        """
        self._ledger.flush_reports(wait=False)
        if self._plan is None and self._flight is None:
            self._ledger.mean_loss()  # forgotten: the step belongs to no period
        begins = self._plan == clock.step
        lands = self._flight is not None and (begins or self._flight.due == clock.step)
        share = self._taken(copy=lands) if begins and self.delay else None
        if lands:
            self.land(clock)
        if self._flight and clock.step == self._halfway(self._flight):
            with torch.no_grad(), naming(self._flight.clock):
                self._flight.advance()
        if begins:
            self.begin(clock, share)
            if self.delay == 0:
                self.land(clock)

    def _taken(self, *, copy: bool) -> Share | None:
        """This step's own gradients. None for parameters: these are sent as they are after the landing."""
        return self.live.taken(copy=copy) if isinstance(self.live, Gradients) else None

    def _halfway(self, round_: Round) -> int | None:
        return halfway(round_.clock.step, soonest(round_.due, self._plan))

    def _ask(self, clock: Clock) -> None:
        """Plan the next round."""
        self._ledger.flush_reports(wait=bool(self.when.needs))
        self._plan = self.when.next(
            self._ledger.told(replace(clock, round=self._round)), self._states["when"]
        )
        if self._plan is None:
            return
        if not self._opened:
            self._open()
        assert self._plan > clock.step, f"{self.when!r} plans step {self._plan} after step {clock.step}"

    @torch.no_grad()
    def _open(self) -> None:
        """The first period begins."""
        self.update.open(list(self.live.like().values()), self.payload.own, self._states["update"])
        self._opened = True

    @torch.no_grad()
    def begin(self, clock: Clock, share: Share | None = None) -> None:
        """Send this worker's share of the round: the live tensors, unless it was taken earlier."""
        comm = Metered(self.peers.at(self._round))
        clock = replace(clock, round=self._round, workers=comm.size, rates=self._rates)
        state = self._states["update"]
        memory = self._states.get("reduce", state)  # an update that owns its code has one state for both
        with profiled("offbeat.begin"), naming(clock):
            began = comm.now()
            head = header(ROUND, self._index, clock, self._marks, self.peers.everyone.rank)
            heads = comm.tell([*head, self.payload.moments.mark()]).then(compare_headers)
            moments = self.payload.moments.averaged(heads.wait, comm)
            waited = comm.now() - began
            packed = self.payload.pack(
                lambda live, room: self.update.outgoing(live, room, clock, state), share
            )
            self._flight = Round(
                clock=clock,
                due=None if self.delay == "round" else clock.step + self.delay,
                period=clock.step - self._began_at,
                comm=comm,
                began=began,
                waited=waited,
                heads=heads,
                mean=self.reduce.start(packed, comm, clock, memory),
                followed=self.payload.buffers.follow(comm),
                moments=send_mean(moments, comm),
                sent=[t.clone() for t in self.payload.extras(moments)] if self.delay else None,
            )
        self._round, self._began_at, self._plan = self._round + 1, clock.step, None

    @torch.no_grad()
    def land(self, clock: Clock) -> None:
        """Wait for the round's messages and apply them."""
        assert self._flight is not None
        round_, self._flight = self._flight, None
        with profiled("offbeat.land"), naming(round_.clock):
            round_.wait()
            clock = replace(clock, round=round_.clock.round, workers=round_.comm.size, rates=self._rates)
            distances = self._apply(round_, clock)
        stepped, self._landed_at = clock.step > self._landed_at, clock.step
        self._account(round_, distances, stepped)

    def _apply(self, round_: Round, clock: Clock) -> _Distances | None:
        state = self._states["update"]
        distances: _Distances | None = None

        def incoming(live: Sequence[Tensor], mean: Packed) -> None:
            nonlocal distances
            if self.drift:
                distances = (None, None) if self.reduce.lossy else self.update.distances(live, mean, state)
            self.update.incoming(live, mean, clock, state)

        self.payload.land(round_, incoming)
        return distances

    def _account(self, round_: Round, distances: _Distances | None, stepped: bool) -> None:
        """Without a step since the round before, which only `finish()` can bring about, there is no loss."""
        loss = self._ledger.mean_loss()
        lacking = loss is None and "loss" in self.when.needs
        if distances is None or (lacking and not stepped):
            self._ledger.flush_reports(wait=True)  # reports come in the order of their rounds
            self._ledger.emit(round_.report(norm=None))
            return
        drift, norm = distances
        if lacking:
            raise ValueError(
                f"{self.when!r} needs the loss: call sync.observe(loss) before every sync.step()."
            )
        # What decides when the next round comes must be the same for everyone, not only for its peers.
        comm = self.peers.everyone if self.when.needs else round_.comm.comm
        self._ledger.add(round_, comm, drift, loss or 0.0, None if norm is None else math.sqrt(norm))

    def flush_reports(self, *, wait: bool) -> None:
        self._ledger.flush_reports(wait=wait)

    def shared_gradient(self, step: int) -> bool:
        return self.live.early and self._landed_at == step and self._equalizes

    def made_equal(self, step: int) -> bool:
        return not self.live.early and self._landed_at == step and self._equalizes

    @property
    def _equalizes(self) -> bool:
        """Whether the last landing left the same in all these tensors and buffers of all workers."""
        whole = self.live.only is None and self.payload.buffers.equalizes
        return whole and self._everywhere and self.delay == 0 and self.update.equalizes and self.reduce.agrees

    @property
    def _everywhere(self) -> bool:
        """Whether the last round was held among everyone."""
        return self._last_peers.size == self.peers.everyone.size

    @property
    def _last_peers(self) -> Communicator:
        """Those of the last round that was begun; at first those of the first to come."""
        return self.peers.at(max(self._round - 1, 0))

    @torch.no_grad()
    def shown(self) -> tuple[dict[str, Tensor], bool]:
        live, own, state = self.live.tensors, self.payload.own, self._states["update"]
        shown = None if self.live.early else self.update.shown(live(), own, state)
        if shown is None:
            return {}, True
        tensors, agreed = shown
        return dict(zip(self.live.names, tensors, strict=True)), agreed and self._everywhere

    @torch.no_grad()
    def flush(self, clock: Clock) -> bool:
        landed = self._flight is not None
        if landed:
            self._look()
            # No step is left for gradients in the air: only what rides along with them is applied.
            with self.live.aside() if isinstance(self.live, Gradients) else nullcontext():
                self.land(clock)
        self._ledger.flush_reports(wait=True)
        closed = not self.live.early and self._close(clock)
        return landed or closed

    def _close(self, clock: Clock) -> bool:
        """The update's last act, which is a round if it sends something."""
        comm = Metered(self._last_peers)
        began = comm.now()
        closed = self.update.close(self.live.tensors(), self.payload.own, comm, self._states["update"])
        if comm.sent:
            clock = replace(clock, round=self._round)
            self._ledger.emit(Report.blocking(clock, comm, began, clock.step - self._began_at))
        return closed

    @torch.no_grad()
    def follow(self) -> None:
        if not self.live.early:
            self.update.follow(self.live.tensors(), self.payload.own, self._states["update"])

    def state_dict(self) -> State:
        round_ = None if self._flight is None else self._flight.state_dict()  # first: arrivals change states
        return {
            "plan": self._plan,
            "round": self._round,
            "began_at": self._began_at,
            "landed_at": self._landed_at,
            "opened": self._opened,
            "ledger": self._ledger.state_dict(),
            "states": copied(self._states),
            "round_": round_,
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        self._plan, self._round, self._began_at = state["plan"], state["round"], state["began_at"]
        self._landed_at, self._opened = state["landed_at"], state["opened"]
        self._ledger.load_state_dict(state["ledger"])
        self._states = copied(state["states"])
        self._flight = None
        if state["round_"] is not None:
            comm = Metered(self.peers.at(state["round_"]["round"]))
            self._flight = Round.resumed(state["round_"], comm, self.payload.room)


def _reducer(reduce: Reducer | None, update: Update, live: Live) -> Reducer:
    """What is sent; an update that owns its code is its own reducer."""
    if isinstance(update, Reducer):
        if reduce is not None:
            raise ValueError(
                f"reduce={reduce!r} with update={update!r}, which has its own: leave reduce out."
            )
        return update
    chosen = Mean() if reduce is None else reduce
    if live.early:
        return chosen
    if not chosen.agrees:
        raise ValueError(f"reduce={chosen!r}: every worker gets its own result, so it is for grads(model).")
    if chosen.lossy and update.sends_weights:
        raise ValueError(
            f"reduce={chosen!r} with update={update!r}: the weights themselves would be rounded; send the "
            "way from an anchor, with update=Outer(SGD(lr=1)), which also averages."
        )
    return chosen


def _check_groups(update: Update, peers: Peers) -> None:
    if update.shares_anchor and not peers.fixed:
        raise ValueError(
            f"update={update!r} with among={peers!r}: the workers of a round must have the same anchor, but "
            "the groups change; use Gossip(SGD(lr=0.7)), whose anchors may differ, or Subgroups(...)."
        )


def _check_delay(delay: Delay, when: Schedule) -> None:
    if delay == "round":
        return
    if not is_whole(delay, 0):
        raise ValueError(f'delay={delay!r}: a number of steps, 0 or more, or "round" is needed.')
    if when.shortest is not None and delay > when.shortest:
        raise ValueError(
            f"delay={delay} with {when!r}: delay must not exceed the period, which can be {when.shortest}."
        )
