"""The user's optimizers: checks, learning rates, scaled or replaced steps, and new states."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_ALL = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"
_KNOWN = {getattr(optim, name) for name in _ALL.split() if hasattr(optim, name)}  # torch may lack Muon

WITHOUT_DDP = (
    "train the model itself, without the wrapper (in Accelerate, prepare_model(model, evaluation_mode=True); "
    "in transformers, OffbeatTrainer; in Lightning, OffbeatStrategy)"
)


def list_optimizers(optimizer: Optimizer | Sequence[Optimizer], model: nn.Module) -> list[Optimizer]:
    """Return the optimizers as a list. Raise if they cannot train this model."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(optimizers, Sequence):
        raise TypeError(f"optimizer={optimizer!r}: pass a torch Optimizer, or a list of them.")
    if not optimizers:
        raise ValueError("optimizer=[]: pass at least one optimizer.")
    check_unwrapped(model)
    own = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer holds a {kind}: pass a torch Optimizer, or a list of them.")
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{kind} holds parameters that are not in the model: build it from the model passed here."
            )
    return list(optimizers)


def check_unwrapped(model: nn.Module) -> None:
    """Raise if the model, or a part of it, is wrapped in DDP."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "The model is wrapped in DistributedDataParallel, which averages gradients at every step: "
            f"{WITHOUT_DDP}."
        )


def check_trained(before: Sequence[tuple[str, Tensor, bool]]) -> None:
    """Raise if a parameter has been frozen or unfrozen since the run began."""
    for name, parameter, trained in before:
        if parameter.requires_grad != trained:
            change = "frozen" if trained else "unfrozen"
            raise RuntimeError(
                f"{name!r} was {change} after the synchronizer was made: call finish() and make a new one."
            )


def learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """Return the rate of the first group of the first optimizer."""
    lr = float(optimizers[0].param_groups[0]["lr"])
    if not math.isfinite(lr):
        raise ValueError(f"The learning rate is {lr}: it must be a finite number; look at its scheduler.")
    return lr


def read_rates(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor] = ()
) -> tuple[int, tuple[float, ...]]:
    """Return a digest of all learning rates, and the rate of each parameter: 0 if no optimizer holds it."""
    groups = [(float(g["lr"]), g["params"]) for optimizer in optimizers for g in optimizer.param_groups]
    own = {id(p): lr for lr, held in groups for p in held} if parameters else {}
    rates = tuple([own.get(id(p), 0.0) for p in parameters])
    return zlib.crc32(repr([lr for lr, _ in groups]).encode()), rates


@contextmanager
def scale_steps(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """Divide the optimizer's rates by a number during its own steps. Schedulers see the user's rates."""
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
def replace_steps(optimizers: Sequence[Optimizer], instead: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call `instead(optimizer)` wherever an optimizer would step."""

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True  # otherwise a scheduler warns that there was no step
        with torch.enable_grad():
            loss = None if closure is None else closure()
        instead(optimizer)
        return loss

    before = [vars(optimizer).get("step") for optimizer in optimizers]  # set where a scheduler wraps the step
    for optimizer in optimizers:
        vars(optimizer)["step"] = own = partial(step, optimizer)
        vars(own)["_wrapped_by_lr_sched"] = True  # otherwise one that steps inside `local` warns as well
    try:
        yield
    finally:
        for optimizer, replaced in zip(optimizers, before, strict=True):
            del vars(optimizer)["step"]
            if replaced is not None:
                vars(optimizer)["step"] = replaced


def check_reset(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
    """Refuse an optimizer whose state cannot be reset to that of a new one."""
    for optimizer in optimizers:
        unknown = type(optimizer) not in _KNOWN and any(p in optimizer.state for p in parameters)
        if unknown and _build(optimizer) is None:
            raise ValueError(
                f'moments="reset" with {type(optimizer).__name__}, whose state before its first step is '
                "unknown: make the synchronizer before the optimizer steps or loads a checkpoint."
            )


def reset(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Reset the state of these parameters, so that the next step is that of a new optimizer.

    For the optimizers of `torch.optim`, tensors are written in place, because a captured graph may use them.
    Any other loses its state and creates it in the next step, or gets the state of a copy built for this.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    held = [p for p in parameters if p in optimizer.state]
    if type(optimizer) in _KNOWN:
        for p in held:
            _reset_state(type(optimizer), optimizer.state[p], groups[p])
    elif held:
        new = _build(optimizer)
        for p in held:
            del optimizer.state[p]
            if new is not None and p in new.state:
                optimizer.state[p] = new.state[p]


def _reset_state(kind: type[Optimizer], state: dict[str, Any], group: dict[str, Any]) -> None:
    # SGD's first buffer is the gradient, undampened. Starting from 0 gives the same only without dampening.
    if kind is optim.LBFGS or (kind is optim.SGD and group["dampening"] != 0):
        state.clear()
        return
    starts: dict[tuple[type[Optimizer], str], str | float] = {
        (optim.Adagrad, "sum"): "initial_accumulator_value",
        (optim.ASGD, "eta"): "lr",
        (optim.ASGD, "mu"): 1.0,
        (optim.NAdam, "mu_product"): 1.0,
        (optim.Rprop, "step_size"): "lr",
    }
    for key, value in state.items():
        if torch.is_tensor(value):
            start = starts.get((kind, key), 0.0)
            number = float(group[start] if isinstance(start, str) else start)
            # As in torch, a complex value starts with equal real and imaginary parts.
            value.fill_(complex(number, number) if value.is_complex() else number)
        elif key == "step":
            state[key] = 0


def _build(optimizer: Optimizer) -> Optimizer | None:
    """Build a copy for the same parameters; None if its groups do not hold all arguments."""
    first, *others = inspect.signature(type(optimizer)).parameters.values()
    names = [p.name for p in others if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    groups = [
        {"params": group["params"], **{name: group[name] for name in names if name in group}}
        for group in optimizer.param_groups
    ]
    options = {name: value for name, value in groups[0].items() if name != "params"}
    required = {p.name for p in others if p.name in names and p.default is p.empty}
    complete = first.name == "params" and required <= options.keys()
    return type(optimizer)(groups, **options) if complete else None
