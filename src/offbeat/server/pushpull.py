"""Gradients pushed every step to a server sharded over the workers, its weights pulled every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from offbeat.among import Peers, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live
from offbeat.comm.communicator import Communicator, Metered
from offbeat.comm.presence import Departure
from offbeat.engine.handshake import ROUND, compare_headers, header
from offbeat.engine.optimizers import mark
from offbeat.engine.part import Part
from offbeat.engine.report import Report
from offbeat.server.groups import groups_of, spans_of
from offbeat.server.replica import Replica
from offbeat.server.rules import LocalRule, LocalStep
from offbeat.server.shard import Factory, Options, Shard, check_server, options_of
from offbeat.server.slots import PushSlots, Slot
from offbeat.server.stability import Watch, sampled, stable_product, warn
from offbeat.server.transport import Pull, Transport


class PushPull(Part):
    """Every step pushes its gradient to a server; every few steps its weights are pulled.

    The server is the workers themselves: rank r owns slice r of all weights, with its optimizer's state, and
    applies the mean gradients in the order of the steps while the workers go on. A pull holds exactly the
    pushes before it and lands in the update of the next step, which it rebases; in between a worker moves by
    its own `local` rule. In the first `warmup` steps every step pulls, and waits: synchronous SGD.

    `server` makes the server's optimizer, at its default `torch.optim.SGD`; its rate, momentum, weight decay
    and whatever else the two have in common are always those of the user's optimizer, which itself never
    steps. `in_flight` is how many pushes may be on their way, each with a copy of the model; when they are,
    the next step waits.

        PushPull(params(model), every=5, warmup=500, local=GLU(alpha=2.0, beta=0.5))
    """

    def __init__(
        self,
        live: Live,
        *,
        every: int,
        warmup: int = 0,
        local: LocalRule | None = None,
        server: Factory | None = None,
        in_flight: int = 2,
        among: Peers | Communicator | None = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("warmup", warmup, 0), ("in_flight", in_flight, 1)):
            if not is_whole(value, least):
                raise ValueError(f"PushPull({name}={value!r}): a whole number, {least} or more, is needed.")
        if local is not None and not isinstance(local, LocalRule):
            raise TypeError(f"PushPull(local={local!r}): a rule is needed, such as GLU(alpha=2.0, beta=0.5).")
        self.live, self.model = live, live.model
        self.every, self.warmup, self.in_flight = every, warmup, in_flight
        self.local = LocalStep() if local is None else local
        self.server = server
        self.peers: Peers = World(among) if among is None or isinstance(among, Communicator) else among
        self.watch = Watch()
        self._index = 0
        self._optimizers: Sequence[Optimizer] = ()
        self._round = self._pulled_at = 0
        self._told = self._reported = (
            0  # bytes: of headers since the last pull; of the task queue, in reports
        )
        self._waited = self._began = 0.0
        self._pull: Pull | None = None
        self._slot: Slot | None = None
        self._clock = Clock(step=0, round=0, lr=0.0)
        self._open = self._left = False

    def __repr__(self) -> str:
        names = ("every", "warmup", "local", "in_flight")
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"PushPull({self.live!r}, {told}, server={self.server!r}, among={self.peers!r})"

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        self._index, self._optimizers, self._emit = index, optimizers, report
        self._factory = check_server(self.server, optimizers)

    def communicators(self) -> list[Communicator]:
        """The task queue has a channel of its own: it sends whenever it can."""
        if not hasattr(self, "_transport"):
            self._transport = Transport(self.peers.everyone)
        return [self.peers.everyone]

    def plan(self, clock: Clock) -> None:
        if self._left:
            raise RuntimeError("step(): this run was ended by an error; make a new synchronizer to go on.")
        if not self._open:
            self._prepare()

    @torch.no_grad()
    def _prepare(self) -> None:
        """The server's weights are those everyone begins with."""
        comm, groups = self.peers.everyone, groups_of(self._optimizers)
        base = Packed.like(self.live.like(), multiple=comm.size)
        base.read(self.live.tensors())
        runs = spans_of(base, self.live.parameters, groups)
        self.replica = Replica(base, runs, len(groups))
        self.shard = Shard(base.flats, runs, (comm.rank, comm.size), self._factory, len(groups))
        self.slots = PushSlots(self.live, base, self.in_flight)
        self._lr_sum = [0.0] * len(groups)  # the server's rates since the last pull
        self._open = True

    def before(self, clock: Clock) -> bool:
        start = self.peers.everyone.now()
        self._slot = self.slots.free(clock.step)
        self._waited += self.peers.everyone.now() - start
        self._look()
        return False

    def stepped(self, optimizer: Optimizer) -> None:
        assert self._slot is not None
        self._slot.take(optimizer)
        self._look()

    def _look(self) -> None:
        """What the optimizers would step with: when `after` comes, a scheduler may already have moved on."""
        self._options, self._marks = options_of(groups_of(self._optimizers)), mark(self._optimizers)

    @torch.no_grad()
    def after(self, clock: Clock) -> None:
        """The step: push, land the pull that is in the air, move; ask for a pull if one is due."""
        assert self._slot is not None
        slot, self._slot = self._slot, None
        gradient, options = slot.close(), self._options
        clock = self._clock = replace(clock, round=self._round)
        synchronous = clock.step <= self.warmup
        if self.server is None and (synchronous or self._pull):
            self._look_out(gradient, options[0]["momentum"], clock)
        self._push(slot, options, clock)  # first: it is under way while a pull is waited for
        if not synchronous:
            origin = self._land() if self._pull else None
            self.replica.move(self.local, gradient, options, origin)
        if synchronous or (clock.step - self.warmup) % self.every == 0:
            self._ask(clock)
        if synchronous:
            self._land()
        self.replica.base.write(self.live.tensors())

    def _push(self, slot: Slot, options: Options, clock: Clock) -> None:
        """Hand the gradient to the task queue, who brings it to the server after those before it."""
        comm = Metered(self.peers.everyone)
        if clock.step == self._pulled_at + 1:
            self._began = comm.now()
        head = header(ROUND, self._index, clock, self._marks, comm.rank)
        heads = comm.tell(head).then(compare_headers)
        slot.applied = self._transport.push(slot.room.flats, self.shard, options, heads, clock)
        self._lr_sum = [lr_sum + now["lr"] for lr_sum, now in zip(self._lr_sum, options, strict=True)]
        self._told += comm.sent

    def _ask(self, clock: Clock) -> None:
        """Ask for the server's weights, as they are after the pushes so far."""
        self._pull = Pull(
            clock=clock,
            period=clock.step - self._pulled_at,
            lr_sum=self._lr_sum,
            told=self._told,
            waited=self._waited,
            began=self._began,
            weights=self._transport.fetch(self.shard, clock),
        )
        self._round += 1
        self._pulled_at, self._lr_sum = clock.step, [0.0] * len(self._lr_sum)
        self._told, self._waited = 0, 0.0

    def _land(self) -> list[Tensor] | None:
        """Rebase on the weights that were pulled; the weights so far, where the rule asks for them."""
        pull, comm = self._pull, self.peers.everyone
        assert pull is not None
        start = comm.now()
        with record_function("offbeat.land"):
            slices, carried = pull.weights.wait()
            waited = comm.now() - start
            origin = None
            if self.local.compares:
                here = self.replica.base.over([torch.zeros_like(flat) for flat in self.replica.base.flats])
                here.read(self.live.tensors())
                origin = here.flats
            norm = self.replica.rebase(slices, pull.lr_sum)
        self._pull = None
        self._emit(pull.report(comm.size, norm, waited, carried - self._reported))
        self._reported = carried
        return origin

    def _look_out(self, gradient: list[Tensor], momentum: float, clock: Clock) -> None:
        """Before a pull lands: is the run still stable?"""
        replica, watch = self.replica, self.watch
        watch.see(sampled(replica.displacement), sampled(gradient), sampled(replica.base.flats))
        limit = stable_product(self.every, round(momentum, 2), *self.local.gains)
        if watch.beyond(clock.lr, limit):
            warn(clock.step, self.every, clock.lr, watch.curvature()[0], limit)

    @torch.no_grad()
    def shown(self) -> dict[str, Tensor]:
        """Return the server's weights after all pushes."""
        if not self._open or self._synchronous:
            return {}
        # A pull in the air holds all pushes so far. Without one, the server is asked, outside the rounds.
        pull = self._pull.weights if self._pull else self._transport.fetch(self.shard, self._clock)
        views = self.replica.base.over([torch.cat(slices) for slices in pull.wait()[0]]).views
        return dict(zip(self.live.names, views, strict=True))

    @property
    def _synchronous(self) -> bool:
        """Whether the last step pulled the server's weights and waited for them."""
        return self._clock.step <= self.warmup

    @torch.no_grad()
    def flush(self, clock: Clock) -> None:
        """Give every worker the server's weights after all pushes."""
        if self._open and not self._synchronous:
            if self._pull is None:
                self._ask(replace(clock, round=self._round))
            self._land()
            self.replica.base.write(self.live.tensors())
        if self._open:
            self.slots.drain()
        self._transport.close()

    def leave(self, departure: Departure) -> None:
        self._left = True
        super().leave(departure)
        if hasattr(self, "_transport"):
            self._transport.abandon()

    def state_dict(self) -> State:
        """Pushes in the air are waited for, and applied: only their order counts. A pull is not."""
        if not self._open:
            return {"open": False}
        self.slots.drain()
        return {
            "open": True,
            "replica": self.replica.state_dict(),
            "shard": self.shard.state_dict(),
            "watch": self.watch.state_dict(),
            "lr_sum": list(self._lr_sum),
            "pull": None if self._pull is None else self._pull.state_dict(self._reported),
            "counts": [self._round, self._pulled_at, self._told],
            "carried": self._transport.sent - self._reported,
            "step": self._clock.step,
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        self._open = False
        if not state["open"]:
            return
        self._prepare()
        self.replica.load_state_dict(state["replica"])
        self.shard.load_state_dict(state["shard"])
        self.watch.load_state_dict(state["watch"])
        self._lr_sum = list(state["lr_sum"])
        now = self.peers.everyone.now()
        self._began = now
        self._round, self._pulled_at, self._told = state["counts"]
        self._reported = self._transport.sent - state["carried"]
        saved = state["pull"]
        self._pull = None if saved is None else Pull.resumed(saved, now, self._reported)
        self._clock = replace(self._clock, step=state["step"])
