"""What methods are made of: options, a record of the call, warm-ups, averages, and fragments of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.among import Group, Peers, communicator
from offbeat.base.checks import is_whole
from offbeat.base.clock import State
from offbeat.base.errors import OffbeatError, show, suggest
from offbeat.base.packed import Packed
from offbeat.base.tensors import grads, params, trainable
from offbeat.engine.agreement import compare_lines
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import BufferRule, MomentRule
from offbeat.engine.part import Part
from offbeat.engine.synchronizer import Synchronizer
from offbeat.reduce import Reducer
from offbeat.update.outer import SGD, Outer
from offbeat.update.update import Correct, Rebase, Replace, Update
from offbeat.when import Every, Never, Schedule, Then, schedule

P = ParamSpec("P")
Optimizers = Optimizer | Sequence[Optimizer]


class Extras(TypedDict, total=False):
    """Options of every method that exchanges parameters; see `Exchange`."""

    buffers: BufferRule
    moments: MomentRule
    drift: bool | None
    guard: float | None


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
            communicator(group)  # raises if it is not a group
            sync = function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            with suppress(OffbeatError, TypeError, ValueError):  # tells the others, which may be waiting
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
            value = value.steps  # equal values are written the same way
        elif isinstance(default, float) and is_whole(value):
            value = float(value)
        elif isinstance(value, list):
            value = tuple(value)
        if value != default:
            written.append(f"{key}={value!r}")
    return f"{name}({', '.join(written)})"


def check_names(name: str, known: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse unknown arguments, and a call without a required one."""
    for key in given:
        if key not in known:
            meant = suggest(key, known)
            raise TypeError(f"{name} has no argument {key!r}{meant}; it takes {', '.join(known)}.")
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
            continue  # a method that takes no schedule explains why
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


def warm_up(model: nn.Module, steps: int, group: Peers | Group) -> list[Part]:
    """Return a part that averages gradients in the first `steps` steps; an empty list if `steps` is 0."""
    if not is_whole(steps, 0):
        raise ValueError(f"{steps!r} synchronous steps: this must be a whole number, at least 0.")
    when = Then(steps, Every(1), Never())
    return [Exchange(grads(model), when=when, among=group, buffers="follow")] if steps else []


def start_after(steps: int, every: int | Schedule) -> Schedule:
    """Return a schedule that starts after `steps` steps."""
    return Then(steps, Never(), schedule(every)) if steps else schedule(every)


def synchronize(
    model: nn.Module,
    optimizer: Optimizers,
    every: int | Schedule,
    update: Update,
    group: Peers | Group,
    *,
    warmup: int = 0,
    **options: Any,
) -> Synchronizer:
    """Return the synchronizer of one exchange of the parameters, after `warmup` synchronous steps."""
    return Synchronizer(
        optimizer,
        [
            *warm_up(model, warmup, group),
            Exchange(params(model), when=start_after(warmup, every), among=group, update=update, **options),
        ],
    )


@dataclass(frozen=True)
class Averaging(Outer):
    """`Replace` for lossy reducers: an outer step with learning rate 1 moves the anchor to the mean.

    The anchor only makes the payload smaller. `averaged()` shows the mean of the live weights, as without a
    code.
    """

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """Show nothing: the consensus is the mean of the live weights, and the anchor lags behind it."""


def average(options: Options, keep: float = 0.0) -> Update:
    """Return an update that blends the parameters with the mean. Larger `keep` keeps more of the former."""
    return Averaging(SGD(lr=1.0), keep=keep) if _is_lossy(options) else Replace(keep)


def correct(options: Options, gain: float | None = 1.0) -> Update:
    """Return an update that shifts the parameters by gain·(mean − sent); None chooses the gain."""
    if gain is None:
        reduce = options.get("reduce")
        gain = 1.0 if isinstance(reduce, Reducer) and reduce.remembers else 0.25
    return Rebase(gain) if _is_lossy(options) else Correct(gain)


def exact(options: Options) -> Options:
    """Return the same options without a lossy code."""
    return {**options, "reduce": None} if _is_lossy(options) else options


def _is_lossy(options: Options) -> bool:
    reduce = options.get("reduce")
    return isinstance(reduce, Reducer) and reduce.lossy


def slow_weights(alpha: float) -> Outer:
    """Return the update of Lookahead: the anchor moves a share `alpha` of the way to the weights."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha={alpha}: alpha must be above 0 and at most 1.")
    return Outer(SGD(alpha))


def take_turn(every: int, i: int, number: int) -> Every:
    """Return the schedule of fragment i. The fragments are spread evenly over the period."""
    if not is_whole(every):
        raise TypeError(f"every={every!r}: fragments take turns within a fixed period; give a number.")
    return Every(every, offset=i * every // number)


def cut_into_fragments(model: nn.Module, number: int) -> list[list[str]]:
    """Return the names of the trainable parameters of each fragment. Each parameter is in exactly one.

    Layer i belongs to fragment i mod `number`. Parameters before the first layer belong to the first
    fragment, those after the last layer to the last. The layers are the children of the model or of a module
    list in it, whichever makes the largest fragment smallest.
    """
    stacks = _list_stacks(model)
    most = max(map(len, stacks))
    if not 1 <= number <= most:
        why = f"the model has {most} layers with trainable parameters"
        raise ValueError(f"fragments={number}: {why}: choose between 1 and {most}.")
    sizes = {name: p.numel() for name, p in trainable(model).items()}
    cuts: list[list[list[str]]] = []
    for layers in [stack for stack in stacks if len(stack) >= number]:
        place = {name: i % number for i, layer in enumerate(layers) for name in layer}
        cut: list[list[str]] = [[] for _ in range(number)]
        outside = 0  # the fragment of parameters that are in no layer
        for name in sizes:
            outside = number - 1 if name in place else outside
            cut[place.get(name, outside)].append(name)
        cuts.append(cut)
    return min(cuts, key=lambda cut: max(sum(sizes[name] for name in names) for names in cut))


def _list_stacks(model: nn.Module) -> list[list[list[str]]]:
    """Return the trainable parameters of each layer, for each module that could be the list of layers."""
    names = {id(p): name for name, p in trainable(model).items()}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    found: list[list[list[str]]] = []
    for stack in [*stacks, model]:
        left = dict(names)  # tied parameters belong to the first layer
        layers = ([left.pop(id(p)) for p in m.parameters() if id(p) in left] for m in stack.children())
        found.append([layer for layer in layers if layer])
    return [layers for layers in found if layers] or [[list(names.values())]]
