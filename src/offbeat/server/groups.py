"""Where the weights of each parameter group lie in the long vectors that are pushed and pulled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.packed import Packed

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class GroupSpan:
    """Values `start` to `stop` of a vector, all of one parameter group."""

    flat: int
    start: int
    stop: int
    group: int

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        return flats[self.flat][self.start : self.stop]


@dataclass(frozen=True)
class ParamSlice:
    """The weights of a run in a local step."""

    base: Tensor  # to be moved, in place
    gradient: Tensor
    displacement: Tensor  # from the last pulled weights to those before
    lr_sum: float  # the sum of the server's rates on it
    origin: Tensor | None  # where the gradient was taken, if that is not the base
    lr: float
    decay: float

    def descend(self, lr: float, gain: float = 1.0) -> None:
        """base ← base − lr (gain·gradient + decay·base)."""
        if self.decay:
            self.base.mul_(1 - lr * self.decay)
        self.base.sub_(self.gradient, alpha=lr * gain)


def groups_of(optimizers: Sequence[Optimizer]) -> Groups:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def spans_of(packed: Packed, parameters: Sequence[Tensor], groups: Groups) -> list[GroupSpan]:
    """As few as possible, in order; what no optimizer holds is in none."""
    own = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    runs: list[GroupSpan] = []
    for (flat, start, n), p in sorted(zip(packed.spans, parameters, strict=True), key=lambda row: row[0]):
        group = own.get(id(p), -1)
        last = runs[-1] if runs else None
        if last and (last.flat, last.stop, last.group) == (flat, start, group):
            runs[-1] = GroupSpan(flat, last.start, start + n, group)
        elif n:
            runs.append(GroupSpan(flat, start, start + n, group))
    return [run for run in runs if run.group >= 0]
