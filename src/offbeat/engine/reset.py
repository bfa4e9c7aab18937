"""Optimizer state as it is in an optimizer that was just built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_State = dict[str, Any]
_Group = dict[str, Any]


def check_reset(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
    """Refuse an optimizer that cannot be given the state of a new one."""
    for optimizer in optimizers:
        if type(optimizer) not in _RULES and any(p in optimizer.state for p in parameters):
            _built(optimizer)


def reset(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Make the next step of these parameters that of a new optimizer.

    The optimizers of `torch.optim` keep their tensors, which are written in place, because a captured graph
    may use them. Any other optimizer loses its state of the parameters and creates it in the next step. One
    that creates state in its constructor is built once more, to read the values.
    """
    rule = _RULES.get(type(optimizer))
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    held = [p for p in parameters if p in optimizer.state]
    if rule is not None:
        for p in held:
            rule(optimizer.state[p], groups[p])
    elif held:
        new = _built(optimizer).state if _buildable(optimizer) else {}
        for p in held:
            del optimizer.state[p]
            if p in new:
                optimizer.state[p] = new[p]


def _zero(state: _State, group: _Group) -> None:
    for key, value in state.items():
        if torch.is_tensor(value):
            value.zero_()
        elif key == "step":
            state[key] = 0


def _sgd(state: _State, group: _Group) -> None:
    """The first buffer is the gradient, undampened. Starting from 0 gives the same only without dampening."""
    _zero(state, group)
    if group["dampening"] != 0:
        state.pop("momentum_buffer", None)


def _adagrad(state: _State, group: _Group) -> None:
    _zero(state, group)
    _fill(state["sum"], group["initial_accumulator_value"])


def _asgd(state: _State, group: _Group) -> None:
    _zero(state, group)
    state["eta"].fill_(float(group["lr"]))
    state["mu"].fill_(1)


def _nadam(state: _State, group: _Group) -> None:
    _zero(state, group)
    state["mu_product"].fill_(1)


def _rprop(state: _State, group: _Group) -> None:
    _zero(state, group)
    _fill(state["step_size"], float(group["lr"]))


def _lbfgs(state: _State, group: _Group) -> None:
    state.clear()


def _fill(tensor: Tensor, value: float) -> None:
    """Real and imaginary parts alike, as torch has it."""
    tensor.fill_(complex(value, value) if tensor.is_complex() else value)


_NAMES: dict[str, Callable[[_State, _Group], None]] = {
    **dict.fromkeys(("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RAdam", "RMSprop"), _zero),
    "SparseAdam": _zero,
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "ASGD": _asgd,
    "NAdam": _nadam,
    "Rprop": _rprop,
    "LBFGS": _lbfgs,
}
# Not every version of torch has Muon.
_RULES = {getattr(torch.optim, name): rule for name, rule in _NAMES.items() if hasattr(torch.optim, name)}


def _buildable(optimizer: Optimizer) -> bool:
    """Whether parameters and the options in its groups are all it takes to build one like it."""
    first, *others = inspect.signature(type(optimizer)).parameters.values()
    known = optimizer.param_groups[0]
    needed = [
        p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return first.name == "params" and all(name in known for name in needed)


def _built(optimizer: Optimizer) -> Optimizer:
    """A new one like it, on the same parameters."""
    kind = type(optimizer)
    if not _buildable(optimizer):
        raise ValueError(
            f'moments="reset" with {kind.__name__}, which has state before its first step: how to make that '
            "state is not known. Make the synchronizer before the optimizer steps or loads a checkpoint."
        )
    taken = inspect.signature(kind).parameters.keys() - {"params"}
    groups = [
        {"params": group["params"], **{name: group[name] for name in taken if name in group}}
        for group in optimizer.param_groups
    ]
    return kind(groups, **{name: value for name, value in groups[0].items() if name != "params"})
