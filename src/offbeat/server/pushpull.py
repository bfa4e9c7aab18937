"""Gradients pushed every step to a server sharded over the workers, and weights pulled every few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.among import Group, Peers, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure
from offbeat.engine.optimizers import read_rates
from offbeat.engine.part import Part
from offbeat.engine.report import Emit
from offbeat.engine.round import Round
from offbeat.server.rules import LocalRule, LocalStep, StabilityWatch
from offbeat.server.shard import OptimizerFactory, Replica, Shard, Slot, Transport, check_server, read_options


class PushPull(Part):
    """Pushes a gradient to a server at every step and pulls the server's weights every `every` steps.

    The workers themselves are the server: rank r owns slice r of all weights and its optimizer state. It
    applies the mean gradients in the order of the steps, while the workers compute. A pull contains exactly
    the pushes before it, and replaces the worker's weights in the next step. Between pulls a worker moves by
    its `local` rule. The first `warmup` steps are synchronous SGD: each step pulls and waits.

    `server` makes the server's optimizer and defaults to `torch.optim.SGD`. Its learning rate, momentum,
    weight decay and other shared options always follow the user's optimizer, which itself never steps.
    `in_flight` is the largest number of unfinished pushes, each with a copy of the model; beyond it the next
    step waits.

        PushPull(params(model), every=5, warmup=500, local=GLU(alpha=2.0, beta=0.5))
    """

    unshared = "each worker holds a slice of the server's weights"

    def __init__(
        self,
        live: Live,
        *,
        every: int,
        warmup: int = 0,
        local: LocalRule | None = None,
        server: OptimizerFactory | None = None,
        in_flight: int = 2,
        among: Peers | Group = None,
    ) -> None:
        for key, value, low in (("every", every, 1), ("warmup", warmup, 0), ("in_flight", in_flight, 1)):
            if not is_whole(value, low):
                raise ValueError(f"PushPull({key}={value!r}): {key} must be a whole number, at least {low}.")
        if not isinstance(local, LocalRule | None):
            raise TypeError(f"PushPull(local={local!r}): pass a rule, such as GLU(alpha=2.0, beta=0.5).")
        self.live, self.model, self.server = live, live.model, server
        self.every, self.warmup, self.in_flight = every, warmup, in_flight
        self.local = LocalStep() if local is None else local
        self.peers: Peers = World(among) if isinstance(among, Group) else among
        self._transport, self._watch, self._left = Transport(), StabilityWatch(every, self.local), False
        self._round: Round  # collects pushes until their result is requested
        self._pull: Round | None = None  # requested, not yet landed
        self._slot: Slot  # of the current step
        self.slots: list[Slot] = []  # made before the first step, with the server

    def __repr__(self) -> str:
        names = "every", "warmup", "local", "in_flight", "server"
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"PushPull({self.live!r}, {options}, among={self.peers!r})"

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        self._index, self._optimizers, self._emit = index, optimizers, report
        self._factory = check_server(self.server, optimizers)

    def communicators(self) -> list[Communicator]:
        self._transport.connect(self.peers.everyone)
        return [self.peers.everyone]

    def plan(self, clock: Clock) -> None:
        if self._left:
            raise RuntimeError("step(): an error has ended this run; make a new synchronizer to continue.")
        if not self.slots:
            self._prepare(clock)

    @torch.no_grad()
    def _prepare(self, clock: Clock) -> None:
        """The server starts from the weights that all workers have."""
        comm = self.peers.everyone
        base = Packed.like(self.live.like(), multiple=comm.size)
        base.read(self.live.tensors())
        self.replica = Replica(base, self.live.parameters, self._optimizers)
        self.shard = Shard(self.replica, comm.rank, comm.size, self._factory)
        self.slots = [Slot(self.live, base) for _ in range(self.in_flight)]
        self._round, self._pull = Round(clock, comm, since=clock.step), None

    def before(self, clock: Clock) -> bool:
        self._slot = self.slots[clock.step % self.in_flight]
        with self._round.waiting():
            self._slot.applied.wait()  # on a slow network, a fast worker waits here
        self._snapshot_options()
        return False

    def stepped(self, optimizer: Optimizer) -> None:
        self._slot.fill(optimizer)
        self._snapshot_options()

    def _snapshot_options(self) -> None:
        """Read the options of this step now: a scheduler may change them before `after`."""
        self._options, self._rates = read_options(self._optimizers), read_rates(self._optimizers)[0]

    @torch.no_grad()
    def after(self, clock: Clock) -> None:
        """Push the gradient, land the pull in flight, take the local step, and request a pull if due."""
        replica, round, slot = self.replica, self._round, self._slot
        gradient = slot.finish()
        clock = round.clock = replace(clock, round=round.clock.round)
        synchronous = clock.step <= self.warmup
        if self.server is None and (synchronous or self._pull):
            momentum = self._options[0]["momentum"]
            self._watch.check(replica.base.flats, replica.displacement, gradient, momentum, clock)
        if clock.step == round.since + 1:
            round.began = round.comm.now()
        # Push before landing, so that the gradient travels while the pull is awaited.
        heads = round.compare(self._index, self._rates, round.comm.rank, waited=self.totals.seconds_waited)
        slot.applied = self._transport.push(gradient, self.shard, self._options, heads, clock)
        if not synchronous:
            origin = self._land() if self._pull else None
            replica.step(self.local, gradient, self._options, origin)
        sums = zip(replica.next_lr_sum, self._options, strict=True)
        replica.next_lr_sum = [total + now["lr"] for total, now in sums]
        if synchronous or (clock.step - self.warmup) % self.every == 0:
            self._request_pull()
        if synchronous:
            self._land()
        replica.base.write(self.live.tensors())

    def _request_pull(self) -> None:
        """Request the server's weights after the pushes so far."""
        round = self._pull = self._round
        round.mean = self._transport.fetch(self.shard, round.clock, round)
        round.messages = [round.mean]  # the headers arrive before it
        clock = replace(round.clock, round=round.clock.round + 1)
        self._round = Round(clock, self.peers.everyone, since=clock.step)

    def _land(self) -> list[Tensor] | None:
        """Replace the base with the pulled weights. Return the live weights if the rule compares them."""
        round, self._pull = self._pull, None
        assert round is not None
        with round.phase("offbeat.land"):
            round.wait()
            origin = None
            if self.local.compares:
                origin = [torch.zeros_like(flat) for flat in self.replica.base.flats]
                self.replica.base.over(origin).read(self.live.tensors())
            norm = self.replica.rebase(round.mean.wait().flats)
        self._emit(round.report(norm=norm))
        return origin

    @torch.no_grad()
    def shown(self) -> dict[str, Tensor]:
        """Return the server's weights after all pushes."""
        if not self._behind:
            return {}
        # A pull in flight already contains all pushes. Otherwise fetch the weights outside the rounds.
        weights = self._pull.mean if self._pull else self._transport.fetch(self.shard, self._round.clock)
        return dict(zip(self.live.names, weights.wait().views, strict=True))

    @property
    def _behind(self) -> bool:
        """Whether the server may have weights that this worker lacks."""
        return bool(self.slots) and self._round.clock.step > self.warmup

    @torch.no_grad()
    def flush(self, clock: Clock) -> None:
        """Give all workers the server's weights after all pushes."""
        if self._behind:
            if self._pull is None:
                self._request_pull()
            self._land()
            self.replica.base.write(self.live.tensors())
        self._drain()
        for queue in self._transport.queues:
            queue.close()

    def _drain(self) -> None:
        """Wait until the server has applied all pushes."""
        for slot in self.slots:
            slot.applied.wait()

    def leave(self, departure: Departure) -> None:
        self._left = True
        super().leave(departure)
        for queue in self._transport.queues:
            queue.abandon()

    def state_dict(self) -> State:
        """Wait for the pushes in flight and apply them. A pull in flight is saved, not applied."""
        if not self.slots:
            return {"open": False}
        self._drain()
        round, pull = self._round, self._pull
        return {
            "open": True,
            "replica": self.replica.state_dict(),
            "shard": self.shard.state_dict(),
            "watch": self._watch.state_dict(),
            "pull": None if pull is None else pull.state_dict(),
            "step": round.clock.step,
            "round": round.clock.round,
            "since": round.since,
            "bytes": [round.comm.sent, self._transport.comms[0].sent],
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        self.slots = []
        if not state["open"]:
            return
        self._prepare(Clock(step=state["step"], round=state["round"], lr=0.0))
        self.replica.load_state_dict(state["replica"])
        self.shard.load_state_dict(state["shard"])
        self._watch.load_state_dict(state["watch"])
        comm, base, self._round.since = self._round.comm, self.replica.base, state["since"]
        comm.sent, self._transport.comms[0].sent = state["bytes"]
        comm.received = comm.sent
        if state["pull"] is not None:
            memory = base.over([torch.zeros_like(flat) for flat in base.flats])
            self._pull = Round.resume(state["pull"], self.peers.everyone, memory)
