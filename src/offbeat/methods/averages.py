"""How a mean is applied, by what is sent: codes that lose something need an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.base.clock import State
from offbeat.base.packed import Packed
from offbeat.methods.call import Options
from offbeat.reduce import Reducer
from offbeat.update.outer import SGD, Outer, Rebase
from offbeat.update.update import Correct, Replace, Update


@dataclass(frozen=True)
class Averaging(Outer):
    """`Replace` for reducers that lose something: an outer step of rate 1 takes the anchor to the mean.

    The anchor is only a way to send less. `averaged()` shows the mean of the live weights, as without a code.
    """

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The consensus is the mean of the live weights: the anchor is a round behind."""


def average(options: Options, keep: float = 0.0) -> Update:
    """Parameters become the mean, blended with what they are."""
    return Averaging(SGD(lr=1.0), keep=keep) if loses(options) else Replace(keep)


def correct(options: Options) -> Update:
    """Parameters are moved by as much as what was sent is from the mean."""
    return Rebase() if loses(options) else Correct()


def exact(options: Options) -> Options:
    """The same options, where a mean must lose nothing."""
    return {**options, "reduce": None} if loses(options) else options


def loses(options: Options) -> bool:
    reduce = options.get("reduce")
    return isinstance(reduce, Reducer) and reduce.lossy
