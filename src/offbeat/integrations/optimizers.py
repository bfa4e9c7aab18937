"""What optimizers must do inside frameworks that own the step."""

from collections.abc import Iterable

from torch.optim import LBFGS, Optimizer


def check_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise for an optimizer whose step consists of several."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError("LBFGS computes the loss several times in one step: use another optimizer.")
