"""Gradients averaged among all workers at every step, without waiting for late workers (eager-SGD)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from offbeat.among import World
from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.base.tensors import Gradients
from offbeat.comm.background import Sidecar
from offbeat.waitfree.base import Waitfree
from offbeat.waitfree.handover import SumGradients

Activation = Literal["solo", "majority"]


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
        return (
            f"EagerGradients({self.live!r}, every={self.every}, activation={self.activation!r}, "
            f"grace={self.grace}, seed={self.seed})"
        )

    def calls(self, round: int) -> bool:
        comm = self.peers.everyone
        return self.activation == "solo" or whole(self.seed, round, "initiator") % comm.size == comm.rank

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
