"""How a worker moves between two pulls, and a watch for learning rates that are not stable."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State

Flats = Sequence[Tensor]
_MOST, _LEAST = 64, 16  # pulls to which the curvature is fitted
_SAMPLE = 1 << 16  # weights that are sampled


class ParamSlice(NamedTuple):
    """Weights of one parameter group, as a local rule sees them."""

    base: Tensor  # the rule moves it in place
    gradient: Tensor
    displacement: Tensor  # the weights of the previous pull minus those of the last one
    lr_sum: float  # server learning rates between those two pulls, summed
    origin: Tensor | None  # the weights the gradient was taken at, if they are not the base
    lr: float
    decay: float

    def descend(self, lr: float, gain: float = 1.0) -> None:
        """base ← base − lr (gain·gradient + decay·base)."""
        if self.decay:
            self.base.mul_(1 - lr * self.decay)
        self.base.sub_(self.gradient, alpha=lr * gain)


class LocalRule:
    """How a worker moves its base, its own copy of the weights, between two pulls. A frozen value."""

    compares = False  # whether the rule uses the weights the gradient was taken at

    @property
    def gains(self) -> tuple[float, float]:
        """The factors of the worker's gradient and of the server's mean step."""
        raise NotImplementedError

    def move(self, params: ParamSlice) -> None:
        """Move `params.base` by one step, in place."""
        raise NotImplementedError


@dataclass(frozen=True)
class LocalStep(LocalRule):
    """A plain SGD step with the worker's own gradient: b ← b − γ (g + wd·b)."""

    gains = (1.0, 0.0)

    def move(self, params: ParamSlice) -> None:
        params.descend(params.lr)


@dataclass(frozen=True)
class GLU(LocalRule):
    """A step with the worker's own gradient plus the server's mean step of the last period.

        b ← b − lr (alpha·g + wd·b + beta·ĝ)        ĝ = (P_prev − P_cur) / Σγ

    P_prev and P_cur are the weights of the last two pulls, and Σγ sums the server's learning rates between
    them. Larger `alpha` trusts the worker's own gradient more; larger `beta` follows the server further.
    alpha=1 with beta equal to the server's momentum gives one heavy-ball step of the server. `lr` defaults
    to the optimizer's.
    """

    alpha: float = 2.0
    beta: float = 0.5
    lr: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{self!r}: {name} must be a finite number, at least 0.")
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise ValueError(f"{self!r}: lr must be a finite number, at least 0, or None.")

    @property
    def gains(self) -> tuple[float, float]:
        return self.alpha, self.beta

    def move(self, params: ParamSlice) -> None:
        lr = params.lr if self.lr is None else self.lr
        params.descend(lr, self.alpha)
        if self.beta and params.lr_sum:
            params.base.sub_(params.displacement, alpha=lr * self.beta / params.lr_sum)


@dataclass(frozen=True)
class Compensated(LocalRule):
    """A plain SGD step whose gradient is corrected for the weights it is applied to.

        b ← b − γ (g + wd·b + lam·g²·(b − x))

    x are the weights the gradient was taken at, which equal b unless a pull has just landed. Larger `lam`
    assumes a more strongly curved loss.
    """

    lam: float = 0.04
    compares = True
    gains = (1.0, 0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"{self!r}: lam must be a finite number, at least 0.")

    def move(self, params: ParamSlice) -> None:
        moved = None if params.origin is None else params.base - params.origin
        params.descend(params.lr)
        if moved is not None:
            correction = moved.mul_(params.gradient).mul_(params.gradient)
            params.base.sub_(correction, alpha=params.lr * self.lam)


@functools.cache
def stable_product(every: int, momentum: float, alpha: float, beta: float) -> float:
    """The largest product of learning rate and curvature with which a quadratic loss still converges.

    On ½·h·w² one period between pulls is a linear map of five numbers, and depends on lr and h through lr·h
    alone. The run diverges where the spectral radius of the map exceeds 1.
    """

    def diverges(product: float) -> bool:
        """At learning rate 1. The map acts on the last two pulls, the server's W and v, and the base."""
        before, pulled, weight, velocity, x = torch.eye(5, dtype=torch.float64)
        before, pulled, base = pulled, weight, weight
        for _ in range(every):
            gradient = product * x
            x = base = base - alpha * gradient - beta * (before - pulled) / every
            velocity = momentum * velocity + gradient
            weight = weight - velocity
        period = torch.stack([before, pulled, weight, velocity, x])
        return float(torch.linalg.eigvals(period).abs().max()) > 1 + 1e-7

    low, high = 0.0, 2 * (1 + momentum) + 1  # synchronous SGD diverges at 2 (1 + momentum)
    for product in torch.logspace(-4, math.log10(high), 400, dtype=torch.float64).tolist():
        if diverges(product):
            high = product
            break
        low = product
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if diverges(middle) else (middle, high)
    return low


class StabilityWatch:
    """Warns once when learning rate times curvature exceeds the stable limit.

    The curvature is measured along ĝ, the server's mean step, because the workers move along it. Between two
    successive pulls it is ⟨g' − g, ĝ⟩ / ⟨x' − x, ĝ⟩, with x the weights when a pull lands and g the gradient
    taken there, fitted to the last pulls by least squares. ĝ comes from earlier steps than g, so the noise of
    the gradients averages out. Every step of a warm-up pulls: the curvature is known before workers drift.
    """

    def __init__(self, every: int, rule: LocalRule) -> None:
        self.every, self.rule, self.warned = every, rule, False
        self._last: list[Tensor] | None = None  # gradient and weights when the last pull landed
        self._rows: list[list[float]] = []  # their changes along the displacement, pull by pull

    def check(self, base: Flats, moved: Flats, gradient: Flats, momentum: float, clock: Clock) -> None:
        """When a pull lands: take a sample, and warn if the run is certainly beyond the limit."""
        along, now = _thin(moved), [_thin(gradient), _thin(base)]
        length = float(torch.linalg.vector_norm(along))
        if self._last is not None and length:
            row = [float((new - old) @ along) / length for new, old in zip(now, self._last, strict=True)]
            self._rows = [*self._rows[1 - _MOST :], row]
        self._last = now
        limit = stable_product(self.every, round(momentum, 2), *self.rule.gains)
        guess, lowest = self._curvature()
        if clock.lr * lowest <= limit or self.warned:  # NaN warns
            return
        self.warned, every, lr = True, self.every, clock.lr
        warnings.warn(
            f"PushPull(every={every}) at step {clock.step}: lr={lr:g} times the curvature of the loss, about "
            f"{guess:.2g}, is {lr * guess:.2g}, but every={every} is stable only below {limit:.2g}: lower "
            "the learning rate or every.",
            stacklevel=2,
        )

    def _curvature(self) -> tuple[float, float]:
        """Return the estimate, and a lower bound three standard errors below it."""
        moved = sum((x * x for _, x in self._rows), 0.0)
        if len(self._rows) < _LEAST or not moved:
            return 0.0, 0.0
        guess = sum((g * x for g, x in self._rows), 0.0) / moved
        rest = sum(((g - guess * x) * (g - guess * x) for g, x in self._rows), 0.0)
        return guess, guess - 3 * math.sqrt(rest / (len(self._rows) - 1) / moved)

    def state_dict(self) -> State:
        """Shares tensors and lists with the watch, which replaces them and never changes them in place."""
        return {"warned": self.warned, "last": self._last, "rows": self._rows}

    def load_state_dict(self, state: State) -> None:
        self.warned, self._last, self._rows = state["warned"], state["last"], state["rows"]


def _thin(flats: Flats) -> Tensor:
    """Return values spread evenly over all vectors, few enough to cost nothing."""
    stride = max(1, sum(flat.numel() for flat in flats) // _SAMPLE)
    return torch.cat([flat[::stride].double() for flat in flats])
