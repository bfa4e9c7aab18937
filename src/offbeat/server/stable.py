"""Where pushing every step and pulling every k is stable, and whether a run still is."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from offbeat.schedule import State

_FIRST = 10  # pulls that a run is measured by at least: momentum has built up by then
_GROWTH = 4.0  # times the longest step of those


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
    """Warns, once, when the server's mean step grows as it does outside of the stable region only.

    Outside of it every period multiplies the step by more than 1, so that it soon exceeds all bounds; inside
    it stays near what it was. It is measured by the longest of the synchronous beginning, or of the first
    ten pulls, whichever are more.
    """

    def __init__(self) -> None:
        self.pulls, self.longest, self.warned = 0, 0.0, False

    def see(self, step: float, *, synchronous: bool) -> bool:
        """The length of the server's mean step in a period; whether it has just left the stable region."""
        self.pulls += 1
        if (synchronous or self.pulls <= _FIRST) and math.isfinite(step):
            self.longest = max(self.longest, step)
            return False
        grown = not step <= _GROWTH * self.longest  # which is so for what is not a number, too
        news = grown and not self.warned
        self.warned = self.warned or grown
        return news

    def state_dict(self) -> State:
        return {"pulls": self.pulls, "longest": self.longest, "warned": self.warned}

    def load_state_dict(self, state: State) -> None:
        self.pulls, self.longest, self.warned = state["pulls"], state["longest"], state["warned"]


def warn(step: int, every: int, lr: float, momentum: float, gains: tuple[float, float]) -> None:
    limit = stable_product(every, momentum, *gains)
    warnings.warn(
        f"PushPull(every={every}) at step {step}: the server's steps are more than {_GROWTH:g} times as long "
        f"as they were: lr={lr:g} times every={every} has left the stable region. With momentum "
        f"{momentum:g}, alpha={gains[0]:g} and beta={gains[1]:g} it ends where "
        f"lr × curvature is {limit:.2g}: lower the learning rate, every or alpha.",
        UserWarning,
        stacklevel=2,
    )
