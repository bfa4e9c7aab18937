"""The user's optimizers: do they fit the model, which rate do they use, and how to hold them still."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def listed(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if not isinstance(optimizer, Sequence):
        raise TypeError(f"optimizer={optimizer!r}: a torch Optimizer, or a list of them, is needed.")
    return list(optimizer)


def check_fit(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Refuse what cannot work, before anything is sent."""
    if not optimizers:
        raise ValueError("optimizer=[]: at least one optimizer is needed.")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer holds a {kind}: a torch Optimizer, or a list of them, is needed.")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "The model is wrapped in DistributedDataParallel, which averages gradients at every step: "
            "pass model.module."
        )
    own = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters the model lacks: "
                "build it from the parameters of the very model passed here."
            )


def learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """That of the first group of the first optimizer."""
    lr = float(optimizers[0].param_groups[0]["lr"])
    if not math.isfinite(lr):
        raise ValueError(f"The learning rate is {lr}: it must be a finite number; look at its scheduler.")
    return lr


def mark(optimizers: Sequence[Optimizer]) -> int:
    """A number that tells the learning rates of all groups apart."""
    return zlib.crc32(repr(group_rates(optimizers)).encode())


def rates(
    parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], given: Sequence[float] | None = None
) -> tuple[float, ...]:
    """The learning rate of each parameter's own group, as it is now or was `given` for each group; 0 for a
    parameter that no optimizer holds."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    now = group_rates(optimizers) if given is None else given
    own = {id(p): lr for group, lr in zip(groups, now, strict=True) for p in group["params"]}
    return tuple(own.get(id(p), 0.0) for p in parameters)


def group_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """The learning rate of every parameter group."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


@contextmanager
def scaled_steps(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """Inside, the optimizer divides its rates by a number during its own steps, and only there.

    Anything else, such as a scheduler that multiplies the rate it finds, sees the rates of the user.
    """
    own: list[tuple[dict[str, Any], Any]] = []  # groups and the rates to be given back

    def scale(*_: object) -> None:
        restore()  # a step that failed half-way may have left them scaled
        for group in optimizer.param_groups:
            own.append((group, group["lr"]))
            group["lr"] = group["lr"] / divisor

    def restore(*_: object) -> None:
        while own:
            group, lr = own.pop()
            group["lr"] = lr

    hooks = [optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)]
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


@contextmanager
def held_still(optimizers: Sequence[Optimizer], told: Callable[[Optimizer], None]) -> Iterator[None]:
    """Inside, the optimizers do not step: a part does, which is told when they should have."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(patch.object(optimizer, "step", _pretend(optimizer, told)))
        yield


def _pretend(optimizer: Optimizer, told: Callable[[Optimizer], None]) -> Callable[..., Any]:
    def step(closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True  # or else a learning-rate scheduler warns that nobody stepped
        with torch.enable_grad():
            loss = None if closure is None else closure()
        told(optimizer)
        return loss

    vars(step)["_wrapped_by_lr_sched"] = True  # or else one that steps inside `local` warns, too
    return step
