"""What the named methods have in common: their options, and a record of the call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypedDict

from torch import nn
from torch.optim import Optimizer

from offbeat.among import communicator
from offbeat.base.errors import OffbeatError, show
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import BufferRule, MomentRule
from offbeat.engine.handshake import compare_lines
from offbeat.engine.synchronizer import Synchronizer
from offbeat.reduce import Reducer
from offbeat.when import Every, Schedule

P = ParamSpec("P")
Optimizers = Optimizer | Sequence[Optimizer]


class Extras(TypedDict, total=False):
    """Options of every method that exchanges parameters; see `Exchange`."""

    buffers: BufferRule
    moments: MomentRule
    drift: bool | None


class Options(Extras, total=False):
    """Options of methods that also accept a code. By default they send the exact mean."""

    reduce: Reducer | None


def recorded(function: Callable[P, Synchronizer]) -> Callable[P, Synchronizer]:
    """Record the call as one would type it, for repr, checkpoints and the comparison between workers."""
    known = arguments(function)
    kinds = {name: p.annotation for name, p in inspect.signature(function).parameters.items()}

    @functools.wraps(function)
    def method(*args: P.args, **kwargs: P.kwargs) -> Synchronizer:
        try:
            call = _write_call(function.__name__, known, kwargs)
            check_numbers(function.__name__, kinds, kwargs)
            model = kwargs.get("model", args[0] if args else None)
            if not isinstance(model, nn.Module):
                raise TypeError(f"{function.__name__}(model={model!r}): model must be a torch module.")
            sync = function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _share_error(error, kwargs.get("group"))
            raise
        sync.agree(call)
        return sync

    return method


def _write_call(name: str, known: dict[str, Any], given: dict[str, Any]) -> str:
    """The call as one would type it, without defaults."""
    for key in given:
        if key not in known and key not in ("model", "optimizer", "group"):
            raise TypeError(f"{name}({key}=...): no such argument; it takes {', '.join(known)}.")
    for key, default in known.items():
        if default is inspect.Parameter.empty and key not in given:
            raise TypeError(f"{name}() needs {key}=.")
    values = {key: _normalize(given[key], known[key]) for key in known if key in given}
    written = [f"{key}={value!r}" for key, value in values.items() if value != known[key]]
    return f"{name}({', '.join(written)})"


def _normalize(value: Any, default: Any) -> Any:
    """One spelling for equal values: 8 for Every(8), 1.0 for 1, a tuple for a list."""
    if isinstance(value, Every) and value == Every(value.steps):
        return value.steps
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def check_numbers(name: str, kinds: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Refuse other types where the annotation asks for a number. The parts check its range."""
    for key, value in given.items():
        wanted = set(kinds.get(key, "").split(" | "))
        if not wanted & {"int", "float"} or not wanted <= {"int", "float", "None"}:
            continue
        if ("None" in wanted and value is None) or (key == "every" and isinstance(value, Schedule)):
            continue  # a method that takes no schedule says why
        if not isinstance(value, int | float) or (key == "seed" and not isinstance(value, int)):
            kind = "a whole number" if "float" not in wanted else "a number"
            raise TypeError(f"{name}({key}={show(value)}): {key} must be {kind}.")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(f"{name}({key}={show(value)}): {key} must be a number of at most 63 bits.")


def _share_error(error: Exception, group: Any) -> None:
    """Tell the other workers, which wait for this one unless they have the same error."""
    with suppress(OffbeatError, TypeError, ValueError):
        compare_lines([f"the error {str(error)!r}"], communicator(group))


def arguments(function: Callable[..., Synchronizer]) -> dict[str, Any]:
    """A method's own arguments and options with their defaults, `Parameter.empty` if required."""
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "group"}
    taken = {"options": ("reduce", *Extras.__annotations__), "extras": tuple(Extras.__annotations__)}
    names = [name for p in parameters if p.kind is p.VAR_KEYWORD for name in taken[p.name]]
    defaults = inspect.signature(Exchange).parameters
    return {**own, **{name: defaults[name].default for name in names}}
