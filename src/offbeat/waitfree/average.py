"""Weights averaged in groups, every step, without waiting for the late (WAGMA-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from offbeat.companion import Companion
from offbeat.peers import Butterfly
from offbeat.reduce import Reducer
from offbeat.riders import BufferRule, Buffers
from offbeat.schedule import Clock, State
from offbeat.tensors import Live
from offbeat.waitfree.accounts import Accounts
from offbeat.waitfree.attendance import Kind
from offbeat.waitfree.part import Among, Waitfree
from offbeat.waitfree.rounds import Load, Outcome
from offbeat.waitfree.snapshots import Snapshots

Late = Literal["join", "add"]


class Weights(Load, Protocol):
    """Weights that a worker and its companion hand to each other, and what becomes of a mean."""

    def meet(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, before `publish`: a global round left everybody with these."""

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, before `publish`: what its step has left it with."""

    def publish(self, version: int) -> None:
        """In the worker, what is shared being locked: that is its newest, made for this round."""

    def merge(self, tensors: Sequence[Tensor], outcome: Outcome, kind: Kind) -> None:
        """In the worker, after `fetch`: write its tensors."""


class GroupAverage(Waitfree):
    """After every step but each `every`-th the weights are averaged in a group of workers.

    Whoever comes first calls all the others; a worker that is not there contributes, through its companion,
    the weights it had last:

        x ← sum/S              if these very weights are in the sum
        x ← (sum + x)/(S+1)    late: older ones are; each sum is used once, after which x stays as it is

    That is `late="join"`, in which part of what a late worker did is lost. With "add" nothing is: companions
    keep what their workers have, c, up to date, and a step that began at x₀ is added to it whenever it comes:

        c ← sum of all c in the group / S;    c ← c + (x − x₀),  x ← c

    The global rounds, after each `every`-th step, are an `Exchange` before it in the list: there all meet, so
    a contribution is at most every − 1 rounds old. Floating buffers go with the weights where `buffers` are
    averaged, and only globally with "add". Arguments beyond those are described in `Waitfree`.

        [Exchange(params(model), when=Every(10)), GroupAverage(params(model), every=10, among=Butterfly())]
    """

    def __init__(
        self,
        live: Live,
        *,
        every: int,
        among: Among | None = None,
        reduce: Reducer | None = None,
        grace: float | None = None,
        late: Late = "join",
        buffers: BufferRule = "average",
    ) -> None:
        if late not in get_args(Late):
            raise ValueError(f'late={late!r}: choose one of "join", "add".')
        peers = Butterfly() if among is None else among
        super().__init__(live, every=every, among=peers, grace=grace, reduce=reduce)
        self.late = late
        # A running variance that differences are added to might become negative.
        self._buffers = Buffers(live.model, buffers if late == "join" else "keep")
        self._rule = buffers
        self._weights: Weights | None = None
        self._resumed_with: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"GroupAverage({self.live!r}, every={self.every}, among={self.among!r}, reduce={self.reduce!r}, "
            f"grace={self.grace}, late={self.late!r}, buffers={self._rule!r})"
        )

    @property
    def active(self) -> bool:
        """Not where all groups are of one worker, nor where all rounds are global."""
        size = self.among.size if isinstance(self.among, Butterfly) else self.among.everyone.size
        return size > 1 and self.every > 1

    @torch.no_grad()
    def load(self, first: int, companion: Companion) -> Weights:
        # The first forward pass has already moved the buffers: a resumed run knows what they were before it.
        buffers = {f"+{name}": b for name, b in {**self._buffers.averaged(), **self._resumed_with}.items()}
        kind = Snapshots if self.late == "join" else Accounts
        self._weights = kind({**self.live.like(), **buffers}, first - 1, companion)
        self._resumed_with = {}
        return self._weights

    def _tensors(self) -> list[Tensor]:
        return [*self.live.tensors(), *self._buffers.averaged().values()]

    @torch.no_grad()
    def after(self, clock: Clock) -> None:
        if not self.active:
            return
        assert self._weights is not None
        round, weights, tensors = clock.step - 1, self._weights, self._tensors()
        if self.blocking(round):
            weights.meet(tensors)
            self.submit(round, lambda: weights.publish(round), call=False, timed=False)
            self.call_the_roll()
        else:
            weights.write(tensors)
            self.submit(round, lambda: weights.publish(round), call=True, timed=True)
            outcome, kind = self.await_round(round)
            weights.merge(tensors, outcome, kind)
        self.resume()

    def state_dict(self) -> State:
        buffers = {name: buffer.clone() for name, buffer in self._buffers.averaged().items()}
        return {**super().state_dict(), "buffers": buffers}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._resumed_with = dict(state["buffers"])
