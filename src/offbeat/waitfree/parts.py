"""The wait-free parts: gradients averaged at every step (eager-SGD), weights in groups (WAGMA-SGD)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock, State
from offbeat.base.draws import draw_whole
from offbeat.base.tensors import Gradients
from offbeat.comm.background import Sidecar
from offbeat.engine.agreement import checksum
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import Buffers
from offbeat.reduce import Reducer
from offbeat.waitfree.base import Among, Waitfree
from offbeat.waitfree.rounds import AddSteps, Handover, SumGradients
from offbeat.when import Every

Activation = Literal["solo", "majority"]
LateRule = Literal["join", "add"]
_EXAMPLE = "Exchange(params(model), when=Every(10))"
_UNEQUAL = f"this exchange must leave equal weights on all workers at a fixed period, as {_EXAMPLE} does."


class EagerGradients(Waitfree):
    """Averages the gradients that are available before every step.

    A late worker adds its gradient to the one it sends in the next round. The means it missed add up until
    it arrives. Each gradient thus reaches each worker exactly once. At every `every`-th step all workers
    wait for each other, so none is missing.

    `activation` says whose arrival starts a round: "solo" the first worker's, "majority" that of a worker
    drawn from `seed` and the round, by which time half of the others have arrived on average.
    """

    sidecars = True

    def __init__(
        self,
        live: Gradients,
        *,
        every: int,
        among: World | None = None,
        activation: Activation = "solo",
        grace: float | None = None,
        seed: int = 0,
    ) -> None:
        if activation not in get_args(Activation):
            raise ValueError(f'activation={activation!r}: choose "solo" or "majority".')
        super().__init__(live, every=every, among=World() if among is None else among, grace=grace)
        self.activation, self.seed = activation, seed
        self._seen = torch.zeros(len(live.names), dtype=torch.bool)  # which gradients any worker ever had

    def __repr__(self) -> str:
        options = f"activation={self.activation!r}, grace={self.grace}, seed={self.seed}"
        return f"EagerGradients({self.live!r}, every={self.every}, {options})"

    def calls(self, round: int) -> bool:
        comm = self.peers.everyone
        return self.activation == "solo" or draw_whole(self.seed, round, "initiator") % comm.size == comm.rank

    def open_handover(self, version: int, sidecar: Sidecar) -> None:
        notes = {f"+{name}": note for name, note in self.live.notes().items()}
        self.handover = SumGradients({**self.live.like(), **notes}, version, sidecar)

    @torch.no_grad()
    def before(self, clock: Clock) -> bool:
        if self.active:
            (present,) = self.live.notes().values()
            tensors = [*self.live.tensors(), present]
            self.submit(clock.step, tensors)
            self.await_round(clock.step, tensors)
            self._seen |= present > 0
            self.live.land_notes([self._seen])
        return True

    def state_dict(self) -> State:
        return {**super().state_dict(), "seen": self._seen.clone()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._seen = state["seen"].clone()


class GroupAverage(Waitfree):
    """Averages the weights within a group of workers after every step, except at global rounds.

    The first worker to arrive calls the others. A worker that is late contributes its last weights through
    its sidecar. S is the size of the group:

        x ← sum/S              if the sum contains these weights
        x ← (sum + x)/(S+1)    if it contains older ones; each sum is used once, after which x stays

    That is `late="join"`, which loses part of a late worker's steps. `late="add"` loses nothing: the sidecar
    keeps its worker's weights c up to date, and adds a step that began at x₀ whenever it comes:

        c ← sum of all c in the group / S;    c ← c + (x − x₀),  x ← c

    `exchange` runs the global rounds. It stands directly before this part in the list, and says which
    tensors are averaged, how many steps lie between global rounds, and how buffers are treated. A
    contribution is at most every − 1 rounds old. If the exchange averages floating-point buffers, they
    travel with the weights; with "add" they are averaged globally only. `Waitfree` describes `grace`.

        exchange = Exchange(params(model), when=Every(10))
        sync = Synchronizer(optimizer, [exchange, GroupAverage(exchange, among=Butterfly())])
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        among: Among | None = None,
        reduce: Reducer | None = None,
        grace: float | None = None,
        late: LateRule = "join",
    ) -> None:
        if late not in get_args(LateRule):
            raise ValueError(f'late={late!r}: choose "join" or "add".')
        if not isinstance(exchange, Exchange):
            raise TypeError(f"GroupAverage({exchange!r}): pass the global exchange, such as {_EXAMPLE}.")
        live, when = exchange.live, exchange.when
        plain = exchange.delay == 0 and not live.early and live.only is None
        equal = plain and isinstance(exchange.peers, World)
        if not (equal and isinstance(when, Every) and when == Every(when.steps)):
            raise ValueError(f"GroupAverage({exchange!r}): {_UNEQUAL}")
        everyone = exchange.peers.everyone
        peers = Butterfly(group=everyone) if among is None else among
        if peers.everyone is not everyone and (peers.everyone.size > 1 or everyone.size > 1):
            call = f"GroupAverage(exchange, among={peers!r})"
            raise ValueError(f"{call}: the exchange has other workers; give both the same group.")
        super().__init__(live, every=when.steps, among=peers, grace=grace, reduce=reduce)
        self.exchange = self.follows = exchange
        self.late, self._checked = late, False
        # Adding differences to a running variance could make it negative.
        self._buffers = Buffers(self.model, exchange.payload.buffers.rule if late == "join" else "keep")
        self._saved_buffers: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        options = f"reduce={self.reduce!r}, grace={self.grace}, late={self.late!r}"
        return f"GroupAverage({self.live!r}, every={self.every}, among={self.among!r}, {options})"

    @torch.no_grad()
    def open_handover(self, version: int, sidecar: Sidecar) -> None:
        # A resumed run needs the saved buffers: the first forward pass has already changed these.
        buffers = {f"+{name}": b for name, b in {**self._buffers.averaged(), **self._saved_buffers}.items()}
        tensors = {**self.live.like(), **buffers}
        self.handover = (Handover if self.late == "join" else AddSteps)(tensors, version, sidecar)
        self.handover.reset(list(tensors.values()))
        self.handover.publish()
        self._saved_buffers = {}

    @torch.no_grad()
    def after(self, clock: Clock) -> None:
        if self.active:
            round, blocking = clock.step - 1, self.blocking(clock.step - 1)
            if blocking and not self._checked:
                messages = self.outside.tell([checksum(self.live.tensors())]).wait()
                if len({words[0] for words in messages}) > 1:
                    raise ValueError(f"GroupAverage({self.exchange!r}): {_UNEQUAL}")
                self._checked = True
            tensors = [*self.live.tensors(), *self._buffers.averaged().values()]
            self.submit(round, tensors)
            if not blocking:
                self.await_round(round, tensors)
        super().after(clock)

    def state_dict(self) -> State:
        buffers = {name: buffer.clone() for name, buffer in self._buffers.averaged().items()}
        return {**super().state_dict(), "buffers": buffers}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._saved_buffers = dict(state["buffers"])
