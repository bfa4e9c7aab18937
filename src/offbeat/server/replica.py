"""A worker's own weights, and what it knows of the server's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.base.clock import State
from offbeat.base.packed import Packed
from offbeat.server.groups import GroupSpan, ParamSlice
from offbeat.server.rules import LocalRule
from offbeat.server.shard import Options
from offbeat.server.transport import Slices


class Replica:
    """The base a worker moves, the weights pulled last, and how far those pulled before lie from them."""

    def __init__(self, base: Packed, runs: Sequence[GroupSpan], groups: int) -> None:
        self.base, self.runs = base, runs
        self.pulled = [flat.clone() for flat in base.flats]
        self.displacement = [torch.zeros_like(flat) for flat in base.flats]
        self.lr_sum = [
            0.0
        ] * groups  # the server's rates on that displacement, summed, of each parameter group

    def rebase(self, slices: Slices, lr_sum: Sequence[float]) -> float:
        """The base becomes what was pulled; how far that moved it."""
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
            moved += _square(base.sub_(new))
            base.copy_(new)
        self.lr_sum = list(lr_sum)
        return math.sqrt(moved)

    def move(
        self, rule: LocalRule, gradient: Sequence[Tensor], options: Options, origin: Sequence[Tensor] | None
    ) -> None:
        """One local step."""
        for run in self.runs:
            now = options[run.group]
            rule.move(
                ParamSlice(
                    base=run.of(self.base.flats),
                    gradient=run.of(gradient),
                    displacement=run.of(self.displacement),
                    lr_sum=self.lr_sum[run.group],
                    origin=None if origin is None else run.of(origin),
                    lr=now["lr"],
                    decay=now.get("weight_decay", 0.0),
                )
            )

    def state_dict(self) -> State:
        return {
            "base": [flat.clone() for flat in self.base.flats],
            "pulled": [flat.clone() for flat in self.pulled],
            "displacement": [flat.clone() for flat in self.displacement],
            "lr_sum": list(self.lr_sum),
        }

    def load_state_dict(self, state: State) -> None:
        for name, flats in (
            ("base", self.base.flats),
            ("pulled", self.pulled),
            ("displacement", self.displacement),
        ):
            for flat, saved in zip(flats, state[name], strict=True):
                flat.copy_(saved)
        self.lr_sum = list(state["lr_sum"])


def _square(flat: Tensor) -> float:
    length = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    return length * length  # where ** would raise at overflow
