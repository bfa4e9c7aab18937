"""A worker's own weights, and the server weights it last pulled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.clock import State
from offbeat.base.packed import Packed
from offbeat.server.rules import LocalRule

GroupOptions = list[dict[str, Any]]  # lr, momentum, … of each parameter group
Slices = list[list[Tensor]]  # for each flat vector, every rank's slice of it


@dataclass(frozen=True)
class GroupSpan:
    """Values `start` to `stop` of a flat vector, all in the same parameter group."""

    flat: int
    start: int
    stop: int
    group: int

    def view(self, flats: Sequence[Tensor]) -> Tensor:
        return flats[self.flat][self.start : self.stop]


@dataclass(frozen=True)
class ParamSlice:
    """The weights of one span, as a local rule sees them."""

    base: Tensor  # to be moved in place
    gradient: Tensor
    displacement: Tensor  # the weights of the previous pull minus those of the last one
    lr_sum: float  # server learning rates between those two pulls, summed
    origin: Tensor | None  # the weights the gradient was taken at, if they are not the base
    lr: float
    decay: float

    def descend(self, lr: float, gain: float = 1.0) -> None:
        """base ← base − lr (gain·gradient + decay·base)."""
        if self.decay:
            self.base.mul_(1 - lr * self.decay)
        self.base.sub_(self.gradient, alpha=lr * gain)


def param_groups(optimizers: Sequence[Optimizer]) -> GroupOptions:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def find_spans(packed: Packed, parameters: Sequence[Tensor], groups: GroupOptions) -> list[GroupSpan]:
    """The fewest spans that cover all parameters of the groups, in order."""
    group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    spans: list[GroupSpan] = []
    for (flat, start, n), p in sorted(zip(packed.spans, parameters, strict=True), key=lambda row: row[0]):
        group = group_of.get(id(p), -1)  # -1: no optimizer holds it
        last = spans[-1] if spans else None
        if last and (last.flat, last.stop, last.group) == (flat, start, group):
            spans[-1] = GroupSpan(flat, last.start, start + n, group)
        elif n:
            spans.append(GroupSpan(flat, start, start + n, group))
    return [span for span in spans if span.group >= 0]


class Replica:
    """The weights a worker moves (`base`), those it last pulled, and the displacement between two pulls."""

    def __init__(self, base: Packed, spans: Sequence[GroupSpan], groups: int) -> None:
        self.base, self.spans = base, spans
        self.pulled = [flat.clone() for flat in base.flats]
        self.displacement = [torch.zeros_like(flat) for flat in base.flats]
        self.lr_sum = [0.0] * groups  # server learning rates over that displacement, per parameter group

    def rebase(self, slices: Slices, lr_sum: Sequence[float]) -> float:
        """Set the base to the pulled weights. Returns the length of that change."""
        moved = 0.0
        for flat, parts in enumerate(slices):
            old, new = self.pulled[flat], self.displacement[flat]
            n = parts[0].numel()
            for rank, part in enumerate(parts):
                place = slice(rank * n, (rank + 1) * n)
                old[place].sub_(part)
                new[place].copy_(part)
            self.pulled[flat], self.displacement[flat] = new, old
            base = self.base.flats[flat]
            change = float(torch.linalg.vector_norm(base.sub_(new), dtype=torch.float64))
            moved += change * change  # ** would raise on overflow
            base.copy_(new)
        self.lr_sum = list(lr_sum)
        return math.sqrt(moved)

    def step(
        self,
        rule: LocalRule,
        gradient: Sequence[Tensor],
        options: GroupOptions,
        origin: Sequence[Tensor] | None,
    ) -> None:
        """Take one local step."""
        for span in self.spans:
            now = options[span.group]
            rule.move(
                ParamSlice(
                    base=span.view(self.base.flats),
                    gradient=span.view(gradient),
                    displacement=span.view(self.displacement),
                    lr_sum=self.lr_sum[span.group],
                    origin=None if origin is None else span.view(origin),
                    lr=now["lr"],
                    decay=now.get("weight_decay", 0.0),
                )
            )

    def _flats(self) -> dict[str, list[Tensor]]:
        return {"base": self.base.flats, "pulled": self.pulled, "displacement": self.displacement}

    def state_dict(self) -> State:
        saved = {name: [flat.clone() for flat in flats] for name, flats in self._flats().items()}
        return {**saved, "lr_sum": list(self.lr_sum)}

    def load_state_dict(self, state: State) -> None:
        for name, flats in self._flats().items():
            for flat, saved in zip(flats, state[name], strict=True):
                flat.copy_(saved)
        self.lr_sum = list(state["lr_sum"])
