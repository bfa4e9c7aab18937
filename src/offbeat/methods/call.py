"""What named methods have in common: the options they take, and a record of how they were called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypedDict

from torch import nn
from torch.optim import Optimizer

from offbeat.among import communicator
from offbeat.base.errors import OffbeatError, shown
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import BufferRule, MomentRule
from offbeat.engine.handshake import compare_lines
from offbeat.engine.synchronizer import Synchronizer
from offbeat.reduce import Reducer
from offbeat.when import Every, Schedule

P = ParamSpec("P")
Optimizers = Optimizer | Sequence[Optimizer]


class Extras(TypedDict, total=False):
    """What every method that exchanges parameters takes besides its own arguments; see `Exchange`."""

    buffers: BufferRule
    moments: MomentRule
    drift: bool | None


class Options(Extras, total=False):
    """The same where what is sent is free, and by default the exact mean."""

    reduce: Reducer | None


def recorded(function: Callable[P, Synchronizer]) -> Callable[P, Synchronizer]:
    """Record the call, as one would type it, for repr, checkpoints and the comparison of all workers."""
    known = arguments(function)
    kinds = {name: p.annotation for name, p in inspect.signature(function).parameters.items()}

    @functools.wraps(function)
    def method(*args: P.args, **kwargs: P.kwargs) -> Synchronizer:
        try:
            call = _call(function.__name__, known, kwargs)
            check_numbers(function.__name__, kinds, kwargs)
            _check_model(function.__name__, kwargs.get("model", args[0] if args else None))
            sync = function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _refuse(error, kwargs.get("group"))
            raise
        sync.agree(call)
        return sync

    return method


def _call(name: str, known: dict[str, Any], given: dict[str, Any]) -> str:
    """The call as one would type it: what is not the default."""
    for key in given:
        if key not in known and key not in ("model", "optimizer", "group"):
            raise TypeError(f"{name}({key}=...): no such argument; it takes {', '.join(known)}.")
    for key, default in known.items():
        if default is inspect.Parameter.empty and key not in given:
            raise TypeError(f"{name}() needs {key}=.")
    values = {key: _canonical(given[key], known[key]) for key in known if key in given}
    told = [f"{key}={value!r}" for key, value in values.items() if value != known[key]]
    return f"{name}({', '.join(told)})"


def _canonical(value: Any, default: Any) -> Any:
    """One way to write what means the same: 8 for Every(8), 1.0 for 1, a tuple for a list."""
    if isinstance(value, Every) and value == Every(value.steps):
        return value.steps
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def check_numbers(name: str, kinds: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Refuse what is no number where the annotation wants one; whether it is a good one, the parts know."""
    for key, value in given.items():
        wanted = set(kinds.get(key, "").split(" | "))
        if not wanted & {"int", "float"} or not wanted <= {"int", "float", "None"}:
            continue
        if ("None" in wanted and value is None) or (key == "every" and isinstance(value, Schedule)):
            continue  # a method that takes no schedule says why
        if not isinstance(value, int | float) or (key == "seed" and not isinstance(value, int)):
            kind = "a whole number" if "float" not in wanted else "a number"
            raise TypeError(f"{name}({key}={shown(value)}): {key} must be {kind}.")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(f"{name}({key}={shown(value)}): {key} must be a number of at most 63 bits.")


def _check_model(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}(model={model!r}): a torch module is needed.")


def _refuse(error: Exception, group: Any) -> None:
    """Where the others have no such error, they learn of it, since they wait for this worker."""
    with suppress(OffbeatError, TypeError, ValueError):
        compare_lines([f"the error {str(error)!r}"], communicator(group))


def arguments(function: Callable[..., Synchronizer]) -> dict[str, Any]:
    """A method's own arguments and options with their defaults; `Parameter.empty` where one is required."""
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "group"}
    taken = {"options": ("reduce", *Extras.__annotations__), "extras": tuple(Extras.__annotations__)}
    names = [name for p in parameters if p.kind is p.VAR_KEYWORD for name in taken[p.name]]
    defaults = inspect.signature(Exchange).parameters
    return {**own, **{name: defaults[name].default for name in names}}
