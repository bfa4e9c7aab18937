"""The pull toward an anchor between gradient steps (PALSGD)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from offbeat.base.clock import Clock
from offbeat.base.draws import uniform
from offbeat.engine.exchange import Exchange
from offbeat.engine.optimizers import read_rates, scale_steps
from offbeat.engine.part import Part
from offbeat.engine.report import Emit


class PseudoSync(Part):
    """Pulls the weights toward the anchor of an exchange, at random, between gradient steps (PALSGD).

    `offbeat.palsgd` states the rule. Draws depend on `seed` and the iteration, so they are the same on all
    ranks. With shared=False each rank draws for itself; pulls then do not count as iterations, or ranks would
    reach rounds at different times. The first `warmup` iterations neither draw nor scale.
    """

    weighs, unshared = True, None

    def __init__(
        self, exchange: Exchange, *, p: float, eta: float, warmup: int = 0, seed: int = 0, shared: bool = True
    ) -> None:
        call = f"PseudoSync(p={p}, eta={eta})"
        if not 0 <= p < 1:
            raise ValueError(f"{call}: p is the share of pulls: at least 0, below 1.")
        if not eta >= 0:
            raise ValueError(f"{call}: eta must not be negative.")
        if exchange.update.anchors == "none":
            raise ValueError(
                f"{call} after {exchange!r}: the exchange needs an anchor: use update=Outer(SGD(lr=0.7))."
            )
        self.exchange, self.follows, self.model, self.peers = (
            exchange,
            exchange,
            exchange.model,
            exchange.peers,
        )
        self.p, self.eta, self.warmup, self.seed, self.shared = p, eta, warmup, seed, shared
        self._optimizers: Sequence[Optimizer] = ()
        self._rates: tuple[float, ...] = ()  # of the live tensors in the current step, before scaling
        self._scaled = ExitStack()

    def __repr__(self) -> str:
        names = ("p", "eta", "warmup", "seed", "shared")
        return f"PseudoSync({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        self._optimizers = optimizers
        self._rates = read_rates(optimizers, self.exchange.live.parameters)[1]

    def before(self, clock: Clock) -> bool:
        """Scale the rates of the optimizers' own steps until `release`. Schedulers see the user's rates."""
        # Pulls use the rates of this step: a scheduler may change them inside the local step.
        self._rates = read_rates(self._optimizers, self.exchange.live.parameters)[1]
        if clock.step >= self.warmup:
            for optimizer in self._optimizers:
                self._scaled.enter_context(scale_steps(optimizer, 1 - self.p))
        return True

    def release(self) -> None:
        self._scaled.close()

    def after(self, clock: Clock) -> None:
        if not self.shared and clock.step > self.warmup:
            key = (self.seed, clock.step, self.peers.everyone.rank)
            draws = (uniform(*key, i) for i in itertools.count())
            for _ in itertools.takewhile(lambda draw: draw < self.p, draws):
                self._pull()

    def again(self, clock: Clock) -> bool:
        hit = self.shared and clock.step > self.warmup and uniform(self.seed, clock.step) < self.p
        if hit:
            self._pull()
        return hit

    @torch.no_grad()
    def _pull(self) -> None:
        anchor, live = self.exchange.anchor, self.exchange.live
        if anchor is None:
            raise ValueError(
                f"PseudoSync(warmup={self.warmup}): {self.exchange.when!r} has no anchor yet, because its "
                "first period begins later: give both the same warm-up."
            )
        for x, a, lr in zip(live.tensors(), anchor.packed.views, self._rates, strict=True):
            x.lerp_(a.to(x.device, x.dtype), min(1.0, lr * self.eta / self.p))
