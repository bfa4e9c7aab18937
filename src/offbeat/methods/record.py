"""What named methods have in common: the options they take, and a record of how they were called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypedDict

from torch.optim import Optimizer

from offbeat.exchange import Exchange
from offbeat.reduce import Reducer
from offbeat.riders import BufferRule, MomentRule
from offbeat.sync import Synchronizer

P = ParamSpec("P")
Optimizers = Optimizer | Sequence[Optimizer]


class Options(TypedDict, total=False):
    """What every method that exchanges parameters takes besides its own arguments; see `Exchange`."""

    reduce: Reducer | None
    buffers: BufferRule
    moments: MomentRule
    drift: bool | None


def recorded(function: Callable[P, Synchronizer]) -> Callable[P, Synchronizer]:
    """Record the call, as one would type it, for repr, checkpoints and the comparison of all workers."""
    known = arguments(function)

    @functools.wraps(function)
    def method(*args: P.args, **kwargs: P.kwargs) -> Synchronizer:
        for name in kwargs:
            if name not in known and name not in ("model", "optimizer", "group"):
                choice = ", ".join(known)
                raise TypeError(f"{function.__name__}({name}=...): no such argument; it takes {choice}.")
        given = {name: value for name, value in kwargs.items() if name in known and value != known[name]}
        sync = function(*args, **kwargs)
        call = ", ".join(f"{name}={given[name]!r}" for name in known if name in given)
        sync.agree(f"{function.__name__}({call})")
        return sync

    return method


def arguments(function: Callable[..., Synchronizer]) -> dict[str, Any]:
    """A method's own arguments and options with their defaults; `Parameter.empty` where one is required."""
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "group"}
    takes_options = any(p.kind is p.VAR_KEYWORD for p in parameters)
    defaults = inspect.signature(Exchange).parameters
    return {**own, **{name: defaults[name].default for name in Options.__annotations__ if takes_options}}
