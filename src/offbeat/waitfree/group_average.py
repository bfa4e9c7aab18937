"""Weights averaged in groups, every step, without waiting for the late (WAGMA-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock, State
from offbeat.comm.background import Sidecar
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import Buffers
from offbeat.engine.weights import checksum
from offbeat.reduce import Reducer
from offbeat.waitfree.attendance import Kind
from offbeat.waitfree.base import Among, Waitfree
from offbeat.waitfree.ledger import Accounts
from offbeat.waitfree.rounds import Load, Outcome
from offbeat.waitfree.snapshots import Snapshots
from offbeat.when import Every

Late = Literal["join", "add"]
_UNEQUAL = (
    "GroupAverage({!r}): after every so many steps this exchange must leave the same weights on "
    "all workers, as Exchange(params(model), when=Every(10)) does."
)


class Weights(Load, Protocol):
    """Weights that a worker and its sidecar hand to each other, and what becomes of a mean."""

    def meet(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, before `publish`: a global round left everybody with these."""

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, before `publish`: what its step has left it with."""

    def publish(self, version: int) -> None:
        """In the worker, what is shared being locked: that is its newest, made for this round."""

    def merge(self, tensors: Sequence[Tensor], outcome: Outcome, kind: Kind) -> None:
        """In the worker, after `fetch`: write its tensors."""


def _period(exchange: Exchange) -> int:
    """After how many steps the exchange leaves the same weights on all workers."""
    if not isinstance(exchange, Exchange):
        raise TypeError(
            f"GroupAverage({exchange!r}): the Exchange that holds the global rounds is needed, such as "
            "Exchange(params(model), when=Every(10))."
        )
    when = exchange.when
    whole = not exchange.live.early and exchange.live.only is None
    everyone = isinstance(exchange.peers, World) and exchange.delay == 0
    if isinstance(when, Every) and when == Every(when.steps) and whole and everyone:
        return when.steps
    raise ValueError(_UNEQUAL.format(exchange))


class GroupAverage(Waitfree):
    """After every step but each `every`-th the weights are averaged in a group of workers.

    Whoever comes first calls all the others; a worker that is not there contributes, through its sidecar,
    the weights it had last:

        x ← sum/S              if these very weights are in the sum
        x ← (sum + x)/(S+1)    late: older ones are; each sum is used once, after which x stays as it is

    That is `late="join"`, in which part of what a late worker did is lost. With "add" nothing is: sidecars
    keep what their workers have, c, up to date, and a step that began at x₀ is added to it whenever it comes:

        c ← sum of all c in the group / S;    c ← c + (x − x₀),  x ← c

    `exchange` holds the global rounds. It stands directly before this part in the list and says which tensors
    are averaged, after how many steps all workers meet, and what becomes of buffers. All meet there, so a
    contribution is at most every − 1 rounds old. Floating buffers go with the weights if the exchange
    averages them; with "add" they are averaged only globally. `Waitfree` describes the other arguments.

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
        late: Late = "join",
    ) -> None:
        if late not in get_args(Late):
            raise ValueError(f'late={late!r}: choose one of "join", "add".')
        every = _period(exchange)
        everyone = exchange.peers.everyone
        peers = Butterfly(group=everyone) if among is None else among
        if peers.everyone is not everyone and (peers.everyone.size > 1 or everyone.size > 1):
            raise ValueError(
                f"GroupAverage(exchange, among={peers!r}): its workers are not those of the exchange; give "
                "both the same group."
            )
        super().__init__(exchange.live, every=every, among=peers, grace=grace, reduce=reduce)
        self.exchange = self.follows = exchange
        self.late = late
        # A running variance that differences are added to might become negative.
        self._buffers = Buffers(self.model, exchange.payload.buffers.rule if late == "join" else "keep")
        self._checked = False
        self._weights: Weights | None = None
        self._resumed_with: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"GroupAverage({self.live!r}, every={self.every}, among={self.among!r}, reduce={self.reduce!r}, "
            f"grace={self.grace}, late={self.late!r})"
        )

    @property
    def active(self) -> bool:
        """Not where all groups are of one worker, nor where all rounds are global."""
        size = self.among.size if isinstance(self.among, Butterfly) else self.among.everyone.size
        return size > 1 and self.every > 1

    @torch.no_grad()
    def load(self, first: int, sidecar: Sidecar) -> Weights:
        # The first forward pass has already moved the buffers: a resumed run knows what they were before it.
        buffers = {f"+{name}": b for name, b in {**self._buffers.averaged(), **self._resumed_with}.items()}
        kind = Snapshots if self.late == "join" else Accounts
        self._weights = kind({**self.live.like(), **buffers}, first - 1, sidecar)
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
            self._check_equal()
            weights.meet(tensors)
            self.submit(round, lambda: weights.publish(round), call=False, timed=False)
            self.call_the_roll()
        else:
            weights.write(tensors)
            self.submit(round, lambda: weights.publish(round), call=True, timed=True)
            outcome, kind = self.await_round(round)
            weights.merge(tensors, outcome, kind)
        self.resume()

    def _check_equal(self) -> None:
        """Raise on every rank if the first global round left the workers with different weights."""
        if not self._checked:
            heard = self._say([checksum(self.live.tensors())]).wait()
            if len({words[0] for words in heard}) > 1:
                raise ValueError(_UNEQUAL.format(self.exchange))
            self._checked = True

    def state_dict(self) -> State:
        buffers = {name: buffer.clone() for name, buffer in self._buffers.averaged().items()}
        return {**super().state_dict(), "buffers": buffers}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._resumed_with = dict(state["buffers"])
