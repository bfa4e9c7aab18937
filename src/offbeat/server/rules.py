"""How a worker moves between two pulls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.server.groups import ParamSlice


class LocalRule:
    """How a worker moves its own weights, the base, while the server's are on their way. A frozen value."""

    compares = False  # whether it looks at the weights the gradient was taken at

    @property
    def gains(self) -> tuple[float, float]:
        """By how much it weighs the worker's gradient and the server's mean step."""
        raise NotImplementedError

    def move(self, stretch: ParamSlice) -> None:
        """One step of the base, in place."""
        raise NotImplementedError


@dataclass(frozen=True)
class LocalStep(LocalRule):
    """A step of plain SGD with the worker's own gradient.

    b ← b − γ (g + wd·b)
    """

    @property
    def gains(self) -> tuple[float, float]:
        return 1.0, 0.0

    def move(self, stretch: ParamSlice) -> None:
        stretch.descend(stretch.lr)


@dataclass(frozen=True)
class GLU(LocalRule):
    """The worker's own gradient, corrected with the server's mean step of the last period.

        b ← b − lr (alpha·g + wd·b + beta·ĝ)        ĝ = (P_prev − P_cur) / Σγ

    P are the weights of the last two pulls, Σγ the server's rates between them. Larger `alpha` trusts the own
    gradient more, larger `beta` follows the server further. alpha=1 with beta as large as the server's
    momentum is one heavy-ball step of the server's. `lr` is the optimizer's unless it is given.
    """

    alpha: float = 2.0
    beta: float = 0.5
    lr: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{self!r}: {name} must be a number, 0 or more.")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"{self!r}: lr must be a number, 0 or more, or None for the optimizer's.")

    @property
    def gains(self) -> tuple[float, float]:
        return self.alpha, self.beta

    def move(self, stretch: ParamSlice) -> None:
        lr = stretch.lr if self.lr is None else self.lr
        stretch.descend(lr, self.alpha)
        if self.beta and stretch.lr_sum:
            stretch.base.sub_(stretch.displacement, alpha=lr * self.beta / stretch.lr_sum)


@dataclass(frozen=True)
class Compensated(LocalRule):
    """A plain step whose gradient is carried over to the weights it is applied to.

        b ← b − γ (g + wd·b + lam·g²·(b − x))

    x are the weights the gradient was taken at; where no pull came in between, b is x. Larger `lam` takes the
    loss for more curved.
    """

    lam: float = 0.04

    compares = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lam) and self.lam >= 0):
            raise ValueError(f"{self!r}: lam must be a number, 0 or more.")

    @property
    def gains(self) -> tuple[float, float]:
        return 1.0, 0.0

    def move(self, stretch: ParamSlice) -> None:
        extra = None
        if stretch.origin is not None:
            extra = (stretch.base - stretch.origin).mul_(stretch.gradient).mul_(stretch.gradient)
        stretch.descend(stretch.lr)
        if extra is not None:
            stretch.base.sub_(extra, alpha=stretch.lr * self.lam)
