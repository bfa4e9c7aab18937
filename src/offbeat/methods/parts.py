"""What several methods share: synchronous first steps, and averages for exact and lossy codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from offbeat.among import Group, World
from offbeat.base.clock import State
from offbeat.base.packed import Packed
from offbeat.base.tensors import grads
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.methods.call import Options
from offbeat.reduce import Reducer
from offbeat.update.outer import SGD, Outer, Rebase
from offbeat.update.update import Correct, Replace, Update
from offbeat.when import Every, Never, Schedule, Then


def synchronous(model: nn.Module, steps: int, group: Group) -> list[Part]:
    """A part that averages gradients in the first `steps` steps; an empty list if `steps` is 0."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{steps!r} synchronous steps: this must be a whole number, at least 0.")
    when = Then(steps, Every(1), Never())
    return [Exchange(grads(model), when=when, among=World(group), buffers="follow")] if steps else []


def after(steps: int, when: Schedule) -> Schedule:
    """A schedule that starts after `steps` steps."""
    return Then(steps, Never(), when) if steps else when


@dataclass(frozen=True)
class Averaging(Outer):
    """`Replace` for lossy reducers: an outer step with learning rate 1 moves the anchor to the mean.

    The anchor only serves to send less. `averaged()` shows the mean of the live weights, as without a code.
    """

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """Nothing: the mean of the live weights is the consensus, and the anchor lags behind it."""


def average(options: Options, keep: float = 0.0) -> Update:
    """An update that blends the parameters with the mean. Larger `keep` keeps more of the parameters."""
    return Averaging(SGD(lr=1.0), keep=keep) if _lossy(options) else Replace(keep)


def correct(options: Options) -> Update:
    """An update that shifts the parameters by (mean − sent)."""
    return Rebase() if _lossy(options) else Correct()


def exact(options: Options) -> Options:
    """The same options without a lossy code."""
    return {**options, "reduce": None} if _lossy(options) else options


def _lossy(options: Options) -> bool:
    reduce = options.get("reduce")
    return isinstance(reduce, Reducer) and reduce.lossy
