"""How a worker moves between two pulls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


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
