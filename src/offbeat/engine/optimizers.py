"""The user's optimizers: checks, learning rates, and steps that are scaled or replaced."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.base.tensors import named


def as_list(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return one optimizer or several as a list."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if not isinstance(optimizer, Sequence):
        raise TypeError(f"optimizer={optimizer!r}: a torch Optimizer, or a list of them, is needed.")
    return list(optimizer)


def check_fit(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Raise if the optimizers cannot train this model."""
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


class Trained:
    """Which parameters of a model are trained. This must not change during a run."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(name, p, p.requires_grad) for name, p in named(model.named_parameters()).items()]

    def check(self) -> None:
        for name, parameter, before in self._before:
            if parameter.requires_grad != before:
                change = "frozen" if before else "unfrozen"
                raise RuntimeError(
                    f"{name!r} was {change} after the synchronizer was made: finish() it and make another."
                )


def learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """Return the rate of the first group of the first optimizer."""
    lr = float(optimizers[0].param_groups[0]["lr"])
    if not math.isfinite(lr):
        raise ValueError(f"The learning rate is {lr}: it must be a finite number; look at its scheduler.")
    return lr


def mark(optimizers: Sequence[Optimizer]) -> int:
    """Return a digest of the learning rates of all groups."""
    return zlib.crc32(repr(group_rates(optimizers)).encode())


def rates(
    parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], given: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return the learning rate of each parameter; 0 for one that no optimizer holds.

    `given` are the rates of the groups; without it, they are read now.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    now = group_rates(optimizers) if given is None else given
    own = {id(p): lr for group, lr in zip(groups, now, strict=True) for p in group["params"]}
    return tuple(own.get(id(p), 0.0) for p in parameters)


def group_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """Return the learning rate of every parameter group."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


@contextmanager
def scaled_steps(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """Divide the optimizer's rates by a number during its own steps.

    Anything else, such as a scheduler that multiplies the current rate, sees the user's rates.
    """
    own: list[tuple[dict[str, Any], Any]] = []  # groups and the user's rates

    def scale(*_: object) -> None:
        restore()  # a step that failed may have left scaled rates
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
def replaced_steps(optimizers: Sequence[Optimizer], instead: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call `instead(optimizer)` wherever an optimizer would step."""
    before = [vars(optimizer).get("step") for optimizer in optimizers]  # set where a scheduler wraps the step
    for optimizer in optimizers:
        vars(optimizer)["step"] = _replacement(optimizer, instead)
    try:
        yield
    finally:
        for optimizer, step in zip(optimizers, before, strict=True):
            if step is None:
                del vars(optimizer)["step"]
            else:
                vars(optimizer)["step"] = step


def _replacement(optimizer: Optimizer, instead: Callable[[Optimizer], None]) -> Callable[..., Any]:
    def step(closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True  # or a learning-rate scheduler warns that there was no step
        with torch.enable_grad():
            loss = None if closure is None else closure()
        instead(optimizer)
        return loss

    vars(step)["_wrapped_by_lr_sched"] = True  # or a scheduler that steps inside `local` warns as well
    return step
