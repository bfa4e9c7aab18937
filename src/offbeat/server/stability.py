"""Where pushing every step and pulling every k is stable, and whether a run still is."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.base.clock import State

_WINDOW, _LEAST = 64, 16  # pulls that the curvature is fitted to, at most and at least
_SAMPLE = 1 << 16  # weights that are looked at


@functools.cache
def stable_product(every: int, momentum: float, alpha: float, beta: float) -> float:
    """The least product of learning rate and curvature at which a quadratic loss is no longer descended.

    On ½·h·w² one period, from a pull to the next, is a linear map of the weights of the last two pulls, the
    server's weights and velocity and the worker's base; where its spectral radius exceeds 1, each period
    ends further off than the one before. The map depends on lr and h through lr·h alone.
    """
    low, high = 0.0, 2 * (1 + momentum) + 1  # synchronous SGD leaves its own region at 2 (1 + momentum)
    for product in torch.logspace(-4, math.log10(high), 400, dtype=torch.float64).tolist():
        if _radius(product, every, momentum, alpha, beta) > 1 + 1e-7:
            high = product
            break
        low = product
    for _ in range(20):
        middle = (low + high) / 2
        unstable = _radius(middle, every, momentum, alpha, beta) > 1 + 1e-7
        low, high = (low, middle) if unstable else (middle, high)
    return low


def _radius(product: float, every: int, momentum: float, alpha: float, beta: float) -> float:
    return float(torch.linalg.eigvals(_period(product, every, momentum, alpha, beta)).abs().max())


def _period(product: float, every: int, momentum: float, alpha: float, beta: float) -> Tensor:
    """What one period with rate 1 makes of (P_prev, P_cur, W, v, x), column by column."""
    before, pulled, weight, velocity, x = torch.eye(5, dtype=torch.float64)
    before, pulled, base = pulled, weight, weight
    for _ in range(every):
        gradient = product * x
        base = base - alpha * gradient - beta * (before - pulled) / every
        velocity = momentum * velocity + gradient
        weight = weight - velocity
        x = base
    return torch.stack([before, pulled, weight, velocity, x])


class Watch:
    """Warns, once, when learning rate times curvature is beyond what is stable.

    The curvature is that along ĝ, the server's mean step, in which the workers move: with g and x the
    gradient and the weights it was taken at when two successive pulls land, it is ⟨g' − g, ĝ⟩ / ⟨x' − x, ĝ⟩,
    fitted to the last pulls by least squares. ĝ is of steps before g, so that the noise of the gradients is
    not in it and averages out. In the synchronous beginning every step is a pull, so that the curvature is
    known before the workers set out on their own.
    """

    def __init__(self) -> None:
        self.warned = False
        self._last: tuple[Tensor, Tensor] | None = None  # gradient and weights, when the last pull landed
        self._rows: list[tuple[float, float]] = []  # how they changed along the displacement, pull by pull

    def see(self, displacement: Tensor, gradient: Tensor, weights: Tensor) -> None:
        """A pull lands: sample the server's displacement, the gradient, and the point where it was taken."""
        length = float(torch.linalg.vector_norm(displacement))
        if self._last is not None and length:
            before, place = self._last
            row = (
                float((gradient - before) @ displacement) / length,
                float((weights - place) @ displacement) / length,
            )
            self._rows = [*self._rows[1 - _WINDOW :], row]
        self._last = (gradient, weights)

    def curvature(self) -> tuple[float, float]:
        """The best guess, and the least it can be for all that is known: three standard errors less."""
        moved = sum((x * x for _, x in self._rows), 0.0)
        if len(self._rows) < _LEAST or not moved:
            return 0.0, 0.0
        guess = sum((g * x for g, x in self._rows), 0.0) / moved
        rest = sum(((g - guess * x) * (g - guess * x) for g, x in self._rows), 0.0)
        return guess, guess - 3 * math.sqrt(rest / (len(self._rows) - 1) / moved)

    def beyond(self, lr: float, limit: float) -> bool:
        """Whether this is the moment to say that the product is certainly above the limit."""
        news = not lr * self.curvature()[1] <= limit and not self.warned  # so, too, for what is no number
        self.warned = self.warned or news
        return news

    def state_dict(self) -> State:
        last = None if self._last is None else [tensor.clone() for tensor in self._last]
        rows = [list(row) for row in self._rows]
        return {"warned": self.warned, "last": last, "rows": rows}

    def load_state_dict(self, state: State) -> None:
        self.warned = state["warned"]
        last = state["last"]
        self._last = None if last is None else (last[0].clone(), last[1].clone())
        self._rows = [(gradient, place) for gradient, place in state["rows"]]


def sampled(flats: Sequence[Tensor]) -> Tensor:
    """Weights spread evenly over all, few enough to cost nothing."""
    apart = max(1, sum(flat.numel() for flat in flats) // _SAMPLE)
    return torch.cat([flat[::apart].double() for flat in flats])


def warn(step: int, every: int, lr: float, curvature: float, limit: float) -> None:
    warnings.warn(
        f"PushPull(every={every}) at step {step}: lr={lr:g} times the curvature of the loss, about "
        f"{curvature:.2g}, is {lr * curvature:.2g}, and with every={every} stable only below {limit:.2g}: "
        "lower the learning rate or every.",
        UserWarning,
        stacklevel=2,
    )
