"""Gradients pushed every step to a server sharded over the workers, and weights pulled every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from offbeat.among import Group, Peers, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live
from offbeat.comm.communicator import Communicator, Metered
from offbeat.comm.presence import Departure
from offbeat.engine.handshake import ROUND, compare_headers, header
from offbeat.engine.optimizers import read_rates
from offbeat.engine.part import Part
from offbeat.engine.report import Report
from offbeat.server.replica import Replica, find_spans, param_groups
from offbeat.server.rules import LocalRule, LocalStep
from offbeat.server.shard import OptimizerFactory, Shard, check_server, read_options
from offbeat.server.stability import Watch
from offbeat.server.transport import Period, Pull, Slot, Transport


class PushPull(Part):
    """Pushes a gradient to a server at every step and pulls the server's weights every `every` steps.

    The workers themselves are the server: rank r owns slice r of all weights and its optimizer state. It
    applies the mean gradients in the order of the steps, while the workers compute. A pull contains exactly
    the pushes before it. It lands in the next step, which replaces the worker's weights with it. Between
    pulls a worker moves by its `local` rule. The first `warmup` steps are synchronous SGD: each step pulls
    and waits.

    `server` makes the server's optimizer and defaults to `torch.optim.SGD`. Its learning rate, momentum,
    weight decay and other shared options always follow the user's optimizer, which itself never steps.
    `in_flight` is the largest number of unfinished pushes, each with a copy of the model; beyond it the next
    step waits.

        PushPull(params(model), every=5, warmup=500, local=GLU(alpha=2.0, beta=0.5))
    """

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
        for name, value, least in (("every", every, 1), ("warmup", warmup, 0), ("in_flight", in_flight, 1)):
            if not is_whole(value, least):
                raise ValueError(
                    f"PushPull({name}={value!r}): {name} must be a whole number, at least {least}."
                )
        if local is not None and not isinstance(local, LocalRule):
            raise TypeError(
                f"PushPull(local={local!r}): local must be a rule, such as GLU(alpha=2.0, beta=0.5)."
            )
        self.live, self.model = live, live.model
        self.every, self.warmup, self.in_flight = every, warmup, in_flight
        self.local = LocalStep() if local is None else local
        self.server = server
        self.peers: Peers = World(among) if isinstance(among, Group) else among
        self._transport, self._watch = Transport(), Watch(every, self.local)
        self._clock = Clock(step=0, round=0, lr=0.0)
        self._round = 0
        self._pull: Pull | None = None  # requested, not yet landed
        self._slot: Slot | None = None  # of the current step
        self._reported = 0  # bytes sent by the transport that reports contain
        self._open = self._left = False

    def __repr__(self) -> str:
        names = ("every", "warmup", "local", "in_flight", "server")
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"PushPull({self.live!r}, {options}, among={self.peers!r})"

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        self._index, self._optimizers, self._emit = index, optimizers, report
        self._factory = check_server(self.server, optimizers)

    def communicators(self) -> list[Communicator]:
        self._transport.connect(self.peers.everyone)
        return [self.peers.everyone]

    def plan(self, clock: Clock) -> None:
        if self._left:
            raise RuntimeError("step(): an error has ended this run; make a new synchronizer to continue.")
        if not self._open:
            self._prepare()

    @torch.no_grad()
    def _prepare(self) -> None:
        """The server starts from the weights that all workers have."""
        comm, groups = self.peers.everyone, param_groups(self._optimizers)
        base = Packed.like(self.live.like(), multiple=comm.size)
        base.read(self.live.tensors())
        spans = find_spans(base, self.live.parameters, groups)
        self.replica = Replica(base, spans, len(groups))
        self.shard = Shard(base.flats, spans, (comm.rank, comm.size), self._factory, len(groups))
        self.slots = [Slot(self.live, base) for _ in range(self.in_flight)]
        self._period = Period(0, [0.0] * len(groups))
        self._open = True

    def before(self, clock: Clock) -> bool:
        start = self.peers.everyone.now()
        self._slot = self.slots[clock.step % self.in_flight]
        self._slot.await_free()
        self._period.waited += self.peers.everyone.now() - start
        self._snapshot_options()
        return False

    def stepped(self, optimizer: Optimizer) -> None:
        assert self._slot is not None
        self._slot.fill(optimizer)
        self._snapshot_options()

    def _snapshot_options(self) -> None:
        """Read the options of this step now: a scheduler may change them before `after`."""
        self._options = read_options(param_groups(self._optimizers))
        self._rates, _ = read_rates(self._optimizers)

    @torch.no_grad()
    def after(self, clock: Clock) -> None:
        """Push the gradient, land the pull in flight, take the local step, and request a pull if due."""
        assert self._slot is not None
        slot, self._slot = self._slot, None
        gradient, replica = slot.finish(), self.replica
        clock = self._clock = replace(clock, round=self._round)
        synchronous = clock.step <= self.warmup
        if self.server is None and (synchronous or self._pull):
            momentum = self._options[0]["momentum"]
            self._watch.check(replica.displacement, gradient, replica.base.flats, momentum, clock)
        self._push(slot, clock)  # before landing, so that it travels while the pull is awaited
        if not synchronous:
            origin = self._land() if self._pull else None
            replica.step(self.local, gradient, self._options, origin)
        if synchronous or (clock.step - self.warmup) % self.every == 0:
            self._request_pull(clock)
        if synchronous:
            self._land()
        replica.base.write(self.live.tensors())

    def _push(self, slot: Slot, clock: Clock) -> None:
        comm, period = Metered(self.peers.everyone), self._period
        if clock.step == period.start + 1:
            period.began = comm.now()
        heads = comm.tell(header(ROUND, self._index, clock, self._rates, comm.rank)).then(compare_headers)
        slot.applied = self._transport.push(slot.packed.flats, self.shard, self._options, heads, clock)
        rates = [now["lr"] for now in self._options]
        period.lr_sum = [total + lr for total, lr in zip(period.lr_sum, rates, strict=True)]
        period.header_bytes += comm.sent

    def _request_pull(self, clock: Clock) -> None:
        """Request the server's weights after the pushes so far."""
        self._pull = Pull(self._period, clock, self._transport.fetch(self.shard, clock))
        self._round += 1
        self._period = Period(clock.step, [0.0] * len(self._period.lr_sum))

    def _land(self) -> list[Tensor] | None:
        """Replace the base with the pulled weights. Returns the live weights if the rule compares them."""
        pull, comm = self._pull, self.peers.everyone
        assert pull is not None
        start = comm.now()
        with record_function("offbeat.land"):
            slices, carried = pull.weights.wait()
            waited = comm.now() - start
            origin = None
            if self.local.compares:
                base = self.replica.base
                here = base.over([torch.zeros_like(flat) for flat in base.flats])
                here.read(self.live.tensors())
                origin = here.flats
            norm = self.replica.rebase(slices, pull.period.lr_sum)
        self._pull = None
        self._emit(pull.report(comm.size, norm, waited, carried - self._reported))
        self._reported = carried
        return origin

    @torch.no_grad()
    def shown(self) -> dict[str, Tensor]:
        """Return the server's weights after all pushes."""
        if not self._open or self._synchronous:
            return {}
        # A pull in flight already contains all pushes. Otherwise fetch the weights outside the rounds.
        pull = self._pull.weights if self._pull else self._transport.fetch(self.shard, self._clock)
        base = self.replica.base.over([torch.cat(parts) for parts in pull.wait()[0]])
        return dict(zip(self.live.names, base.views, strict=True))

    @property
    def _synchronous(self) -> bool:
        """Whether the last step pulled the server's weights and waited for them."""
        return self._clock.step <= self.warmup

    @torch.no_grad()
    def flush(self, clock: Clock) -> None:
        """Give all workers the server's weights after all pushes."""
        if self._open and not self._synchronous:
            if self._pull is None:
                self._request_pull(replace(clock, round=self._round))
            self._land()
            self.replica.base.write(self.live.tensors())
        if self._open:
            self._drain()
        self._transport.close()

    def _drain(self) -> None:
        """Wait until the server has applied all pushes."""
        for slot in self.slots:
            slot.await_free()

    def leave(self, departure: Departure) -> None:
        self._left = True
        super().leave(departure)
        self._transport.abandon()

    def state_dict(self) -> State:
        """Waits for the pushes in flight and applies them. A pull in flight is saved, not applied."""
        if not self._open:
            return {"open": False}
        self._drain()
        return {
            "open": True,
            "replica": self.replica.state_dict(),
            "shard": self.shard.state_dict(),
            "watch": self._watch.state_dict(),
            "pull": None if self._pull is None else self._pull.state_dict(self._reported),
            "period": [self._period.start, list(self._period.lr_sum), self._period.header_bytes],
            "round": self._round,
            "step": self._clock.step,
            "carried": self._transport.sent - self._reported,
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        self._open = False
        if not state["open"]:
            return
        self._prepare()
        self.replica.load_state_dict(state["replica"])
        self.shard.load_state_dict(state["shard"])
        self._watch.load_state_dict(state["watch"])
        now = self.peers.everyone.now()
        start, lr_sum, header_bytes = state["period"]
        self._period = Period(start, list(lr_sum), header_bytes, began=now)
        self._reported = self._transport.sent - state["carried"]
        self._pull = state["pull"] and Pull.restore(state["pull"], now, self._reported)
        self._round, self._clock = state["round"], replace(self._clock, step=state["step"])
