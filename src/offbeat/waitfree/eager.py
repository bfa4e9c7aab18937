"""Gradients averaged among everyone, every step, without waiting for the late (eager-SGD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from offbeat.among import World
from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.base.packed import Packed
from offbeat.base.tensors import Gradients
from offbeat.comm.background import Sidecar
from offbeat.waitfree.base import Waitfree
from offbeat.waitfree.rounds import Outcome, sync_device

Activation = Literal["solo", "majority"]


class Accumulators:
    """Gradients on their way out and in. What is out of the one is in the other of everyone, once."""

    def __init__(self, like: Mapping[str, Tensor], first: int, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.device = next(iter(like.values())).device
        self._out = [Packed.like(like) for _ in range(2)]
        self._open = 0  # the one gradients are added to; the other may be in the air
        self._version = first - 1
        self._received = Packed.like(like)
        self.fetched = Packed.like(like)

    def add(self, tensors: Sequence[Tensor], version: int) -> None:
        """In the worker, what is shared being locked: one more gradient."""
        torch._foreach_add_(self._out[self._open].views, list(tensors))
        sync_device(self._out[self._open])
        self._version = version

    def take(self, round: int) -> tuple[Packed, int]:
        with self._sidecar.locked():
            taken, version = self._out[self._open], self._version
            self._open = 1 - self._open
            for flat in self._out[self._open].flats:
                flat.zero_()
        return taken, version

    def bring(self, mean: Packed) -> None:
        torch._foreach_add_(self._received.flats, mean.flats)
        sync_device(self._received)

    def fetch(self, outcome: Outcome) -> None:
        self._received, self.fetched = self.fetched, self._received
        for flat in self._received.flats:
            flat.zero_()


class EagerGradients(Waitfree):
    """Before every step the gradients of all workers are averaged, as far as they are there.

    A worker that is late adds its gradient to what it sends in the next round; what the others sent meanwhile
    is added up for it. So each gradient reaches each worker once, and at each `every`-th step, where all wait
    for all, none is missing.

    `activation` says whose arrival begins a round: "solo" is the first one's; "majority" that of a worker
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
            raise ValueError(f'activation={activation!r}: choose one of "solo", "majority".')
        super().__init__(live, every=every, among=World() if among is None else among, grace=grace)
        self.activation, self.seed = activation, seed
        self._accumulators: Accumulators | None = None
        self._seen = torch.zeros(len(live.names), dtype=torch.bool)  # which gradients any worker ever had

    def __repr__(self) -> str:
        return (
            f"EagerGradients({self.live!r}, every={self.every}, activation={self.activation!r}, "
            f"grace={self.grace}, seed={self.seed})"
        )

    def load(self, first: int, sidecar: Sidecar) -> Accumulators:
        notes = {f"+{name}": note for name, note in self.live.notes().items()}
        self._accumulators = Accumulators({**self.live.like(), **notes}, first, sidecar)
        return self._accumulators

    @torch.no_grad()
    def before(self, clock: Clock) -> bool:
        if self.active:
            assert self._accumulators is not None
            round, sums = clock.step, self._accumulators
            notes = list(self.live.notes().values())
            gradients = self.live.tensors()
            call = not self.blocking(round) and self._calls(round)
            self.submit(round, lambda: sums.add([*gradients, *notes], round), call=call, timed=True)
            self.await_round(round)
            own, present = sums.fetched.cut(len(gradients))
            own.write(gradients)
            self._seen |= present.views[0].cpu() > 0
            self.live.landed([self._seen])
        return True

    def _calls(self, round: int) -> bool:
        """Whether this worker's arrival begins a round."""
        comm = self.peers.everyone
        return self.activation == "solo" or whole(self.seed, round, "initiator") % comm.size == comm.rank

    def after(self, clock: Clock) -> None:
        if self.active:
            if self.blocking(clock.step - 1):
                self.call_the_roll()
            self.resume()

    def state_dict(self) -> State:
        return {**super().state_dict(), "seen": self._seen.clone()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._seen = state["seen"].clone()
