"""Gradients pushed every step to a server sharded over the workers, and weights pulled every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from offbeat.among import Peers, World
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live
from offbeat.comm.communicator import Communicator
from offbeat.comm.departure import Departure
from offbeat.comm.metered import Metered
from offbeat.comm.pending import Pending
from offbeat.engine.extras import floating_buffers, send_mean
from offbeat.engine.handshake import AVERAGED, ROUND, compare_headers, header
from offbeat.engine.optimizers import mark
from offbeat.engine.part import Part
from offbeat.engine.report import Report
from offbeat.server.replica import Replica, Slices, find_spans, param_groups
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
        among: Peers | Communicator | None = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("warmup", warmup, 0), ("in_flight", in_flight, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
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
        self.peers: Peers = World(among) if among is None or isinstance(among, Communicator) else among
        self._transport, self._watch = Transport(), Watch(every, self.local)
        self._clock = Clock(step=0, round=0, lr=0.0)
        self._round, self._equal_at = 0, -1
        self._pull: Pull | None = None  # requested, not yet landed
        self._slot: Slot | None = None  # of the current step
        self._buffers_differ = bool(floating_buffers(self.model))
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
        self._options, self._rates = read_options(param_groups(self._optimizers)), mark(self._optimizers)

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
            self._equal_at = clock.step
        replica.base.write(self.live.tensors())

    def _push(self, slot: Slot, clock: Clock) -> None:
        period = self._period
        if clock.step == period.start + 1:
            period.began = self.peers.everyone.now()
        heads = self._send_header(ROUND, clock, self._rates)
        slot.applied = self._transport.push(slot.packed.flats, self.shard, self._options, heads, clock)
        rates = [now["lr"] for now in self._options]
        period.lr_sum = [total + lr for total, lr in zip(period.lr_sum, rates, strict=True)]

    def _send_header(self, kind: int, clock: Clock, rates: int) -> Pending[list[int]]:
        comm = Metered(self.peers.everyone)
        heads = comm.tell(header(kind, self._index, clock, rates, comm.rank)).then(compare_headers)
        self._period.header_bytes += comm.sent
        return heads

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
    def shown(self) -> tuple[dict[str, Tensor], bool]:
        """The server's weights after all pushes."""
        base = self.replica.base
        if self._equal_at != self._clock.step:
            base = base.over([torch.cat(parts) for parts in self._fetch_all()])
        return dict(zip(self.live.names, base.views, strict=True)), True

    def _fetch_all(self) -> Slices:
        """A pull in flight already contains all pushes. Otherwise fetch the weights outside the rounds."""
        if self._pull is not None:
            return self._pull.weights.wait()[0]
        self._send_header(AVERAGED, self._clock, mark(self._optimizers)).wait()
        return self._transport.fetch(self.shard, self._clock).wait()[0]

    @torch.no_grad()
    def flush(self, clock: Clock) -> bool:
        """Give all workers the server's weights after all pushes, and the mean of floating-point buffers."""
        if self._open and self._equal_at != clock.step:
            if self._pull is None:
                self._request_pull(replace(clock, round=self._round))
            self._land()
            self.replica.base.write(self.live.tensors())
            self._equal_at = clock.step
        if self._open:
            self._drain()
            self._average_buffers()
        self._transport.close()
        return self._open

    def _drain(self) -> None:
        """Wait until the server has applied all pushes."""
        for slot in self.slots:
            slot.await_free()

    def _average_buffers(self) -> None:
        if self._buffers_differ:
            comm, buffers = Metered(self.peers.everyone), floating_buffers(self.model)
            began = comm.now()
            send_mean(buffers, comm).wait().write(list(buffers.values()))
            self._buffers_differ = False
            self._emit(Report.blocking(replace(self._clock, round=self._round), comm, began, 0))

    def leave(self, departure: Departure) -> None:
        self._left = True
        super().leave(departure)
        self._transport.abandon()

    def made_equal(self, step: int) -> bool:
        return self._equal_at == step and not self._buffers_differ

    def steps_to_observe(self) -> int:
        return self.warmup + 5 * self.every + self.in_flight  # alternate pushes use the same connections

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
            "counts": [self._round, self._equal_at, self._clock.step],
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
        self._round, self._equal_at, step = state["counts"]
        self._clock = replace(self._clock, step=step)
