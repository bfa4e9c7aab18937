"""What several methods share: warm-ups, averages for exact and lossy codes, and fragments of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offbeat.among import Group
from offbeat.base.checks import is_whole
from offbeat.base.clock import State
from offbeat.base.packed import Packed
from offbeat.base.tensors import grads, params, trainable
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Optimizers, Options
from offbeat.reduce import Reducer
from offbeat.update.outer import SGD, Outer
from offbeat.update.update import Correct, Rebase, Replace, Update
from offbeat.when import Every, Never, Schedule, Then, schedule


def warm_up(model: nn.Module, steps: int, group: Group) -> list[Part]:
    """Return a part that averages gradients in the first `steps` steps; an empty list if `steps` is 0."""
    if not is_whole(steps, 0):
        raise ValueError(f"{steps!r} synchronous steps: this must be a whole number, at least 0.")
    when = Then(steps, Every(1), Never())
    return [Exchange(grads(model), when=when, among=group, buffers="follow")] if steps else []


def start_after(steps: int, every: int | Schedule) -> Schedule:
    """Return a schedule that starts after `steps` steps."""
    return Then(steps, Never(), schedule(every)) if steps else schedule(every)


def exchange_params(
    model: nn.Module,
    optimizer: Optimizers,
    every: int | Schedule,
    update: Update,
    group: Group,
    *,
    warmup: int = 0,
    **options: Any,
) -> Synchronizer:
    """Return a method that exchanges the parameters among all workers, after `warmup` synchronous steps."""
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

    The anchor only serves to send less. `averaged()` shows the mean of the live weights, as without a code.
    """

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """Nothing: the mean of the live weights is the consensus, and the anchor lags behind it."""


def average(options: Options, keep: float = 0.0) -> Update:
    """Return an update that blends the parameters with the mean. Larger `keep` keeps more of the former."""
    return Averaging(SGD(lr=1.0), keep=keep) if _is_lossy(options) else Replace(keep)


def correct(options: Options) -> Update:
    """Return an update that shifts the parameters by (mean − sent)."""
    return Rebase() if _is_lossy(options) else Correct()


def exact(options: Options) -> Options:
    """Return the same options without a lossy code."""
    return {**options, "reduce": None} if _is_lossy(options) else options


def _is_lossy(options: Options) -> bool:
    reduce = options.get("reduce")
    return isinstance(reduce, Reducer) and reduce.lossy


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
    stacks = _stacks(model)
    most = max(map(len, stacks))
    if not 1 <= number <= most:
        raise ValueError(
            f"fragments={number}: the model has {most} layers with trainable parameters: "
            f"choose between 1 and {most}."
        )
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


def _stacks(model: nn.Module) -> list[list[list[str]]]:
    """Return the trainable parameters of each layer, for each module that could be the list of layers."""
    names = {id(p): name for name, p in trainable(model).items()}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    candidates: list[list[list[str]]] = []
    for stack in [*stacks, model]:
        left = dict(names)  # tied parameters belong to the first layer
        layers = [
            [left.pop(id(p)) for p in child.parameters() if id(p) in left] for child in stack.children()
        ]
        candidates.append([layer for layer in layers if layer])
    return [layers for layers in candidates if layers] or [[list(names.values())]]
