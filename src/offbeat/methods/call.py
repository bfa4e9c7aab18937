"""What the named methods have in common: their options, and a record of the call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypedDict

from torch import nn
from torch.optim import Optimizer

from offbeat.among import communicator
from offbeat.base.checks import is_whole
from offbeat.base.errors import OffbeatError, show
from offbeat.engine.agreement import compare_lines
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import BufferRule, MomentRule
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


def record_call(function: Callable[P, Synchronizer]) -> Callable[P, Synchronizer]:
    """Record the call as one would type it, for repr, checkpoints and the comparison between workers."""
    name, known = function.__name__, arguments(function)
    kinds = {key: p.annotation for key, p in inspect.signature(function).parameters.items()}

    @functools.wraps(function)
    def method(*args: P.args, **kwargs: P.kwargs) -> Synchronizer:
        group: Any = kwargs.get("group")
        try:
            call = _write_call(name, known, kwargs)
            check_numbers(name, kinds, kwargs)
            model = kwargs.get("model", args[0] if args else None)
            if not isinstance(model, nn.Module):
                raise TypeError(f"{name}(model={model!r}): model must be a torch module.")
            communicator(group)  # raises if it is none
            sync = function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            with suppress(OffbeatError, TypeError, ValueError):  # the others wait unless they have it too
                compare_lines([f"the error {str(error)!r}"], communicator(group))
            raise
        sync.agree(call)
        return sync

    return method


def _write_call(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Write the call as one would type it, without defaults."""
    given = {key: value for key, value in given.items() if key not in ("model", "optimizer", "group")}
    check_names(name, known, given)
    written = []
    for key in [key for key in known if key in given]:
        value, default = given[key], known[key]
        if isinstance(value, Every) and value == Every(value.steps):
            value = value.steps  # equal values get one spelling
        elif isinstance(default, float) and is_whole(value):
            value = float(value)
        elif isinstance(value, list):
            value = tuple(value)
        if value != default:
            written.append(f"{key}={value!r}")
    return f"{name}({', '.join(written)})"


def check_names(name: str, known: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse arguments the method does not have, and the lack of one that has no default."""
    for key in given:
        if key not in known:
            raise TypeError(f"{name} has no argument {key!r}; it takes {', '.join(known)}.")
    for key, default in known.items():
        if default is inspect.Parameter.empty and key not in given:
            raise TypeError(f"{name} needs {key}=.")


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


def arguments(function: Callable[..., Synchronizer]) -> dict[str, Any]:
    """Return a method's arguments and options with their defaults, `Parameter.empty` if required."""
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "group"}
    taken = {"options": ("reduce", *Extras.__annotations__), "extras": tuple(Extras.__annotations__)}
    names = [name for p in parameters if p.kind is p.VAR_KEYWORD for name in taken[p.name]]
    defaults = inspect.signature(Exchange).parameters
    return {**own, **{name: defaults[name].default for name in names}}
