"""Parts that touch the local step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from offbeat.base.clock import Clock
from offbeat.base.draws import uniform
from offbeat.engine.exchange import Exchange
from offbeat.engine.optimizers import group_rates, rates, scaled_steps
from offbeat.engine.part import Part
from offbeat.engine.report import Report


class PseudoSync(Part):
    """Now and then, instead of a gradient step, a pull towards the anchor of an exchange (PALSGD).

        x ← x − min(1, γ·eta/p)·(x − a)        with probability p, without gradient, data or communication
        gradient steps run with γ/(1 − p)

    It follows a gradient step and counts as an iteration. Draws are a function of `seed` and the iteration,
    the same on all ranks; with shared=False each rank draws for itself, and pulls do not count as iterations,
    since ranks would come to rounds at different times. Nothing is drawn or scaled in the first `warmup`
    iterations. Larger `eta` pulls harder, larger `p` more often and more softly.
    """

    def __init__(
        self, exchange: Exchange, *, p: float, eta: float, warmup: int = 0, seed: int = 0, shared: bool = True
    ) -> None:
        call = f"PseudoSync(p={p}, eta={eta})"
        if not 0 <= p < 1:
            raise ValueError(f"{call}: p is the share of pulls: at least 0, below 1.")
        if not eta >= 0:
            raise ValueError(f"{call}: eta must not be negative.")
        self.exchange, self.model, self.peers = exchange, exchange.model, exchange.peers
        self.follows = exchange
        self.p, self.eta, self.warmup, self.seed, self.shared = p, eta, warmup, seed, shared
        self._optimizers: Sequence[Optimizer] = ()
        self._rates: list[float] = []  # of the parameter groups in the step under way, not scaled
        self._scaled = ExitStack()

    def __repr__(self) -> str:
        names = ("p", "eta", "warmup", "seed", "shared")
        return f"PseudoSync({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        self._optimizers, self._rates = optimizers, group_rates(optimizers)

    def before(self, clock: Clock) -> bool:
        """Until `release`, the optimizers' own steps run with scaled rates. Schedulers see the user's."""
        self._rates = group_rates(self._optimizers)
        if clock.step >= self.warmup:
            for optimizer in self._optimizers:
                self._scaled.enter_context(scaled_steps(optimizer, 1 - self.p))
        return True

    def release(self) -> None:
        self._scaled.close()

    def after(self, clock: Clock) -> None:
        if not self.shared and clock.step > self.warmup:
            rank = self.peers.everyone.rank
            for i in itertools.count():
                if uniform(self.seed, clock.step, rank, i) >= self.p:
                    break
                self._pull()

    def again(self, clock: Clock) -> bool:
        hit = self.shared and clock.step > self.warmup and uniform(self.seed, clock.step) < self.p
        if hit:
            self._pull()
        return hit

    @torch.no_grad()
    def _pull(self) -> None:
        anchors = self.exchange.shown()
        live = self.exchange.live
        # Those of the step just made: a scheduler may have moved on inside the local step.
        own = rates(live.parameters, self._optimizers, self._rates)
        for x, a, lr in zip(live.tensors(), anchors.values(), own, strict=True):
            x.lerp_(a.to(x.device, x.dtype), min(1.0, lr * self.eta / self.p))
