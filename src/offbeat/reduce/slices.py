"""The mean of a vector, slice by slice: each rank sums one slice in float32 and gives it to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.comm import Communicator, Pending
from offbeat.reduce.grain import Grain
from offbeat.reduce.parcel import Vector

Dice = Callable[[str], torch.Generator | None]


class Slices:
    """An all-to-all, a sum in rank order, an all-gather: the bytes of an all-reduce in this grain.

    Each value is rounded once on its way there, its mean once on the way back. All ranks decode the same
    bytes. The second rounding is charged to the residual of the rank that made it.
    """

    def __init__(self, vector: Vector, comm: Communicator, grain: Grain, dice: Dice) -> None:
        self._vector, self._comm, self._grain, self._dice = vector, comm, grain, dice
        units = -(-vector.values.numel() // (comm.size * grain.unit))
        self._length = units * grain.unit
        self._row = grain.size(self._length)
        self._gathered: Pending[list[Tensor]] | None = None

    def send(self) -> Pending[None]:
        wire = self._room("wire", (self._comm.size, self._row), torch.uint8)
        dice = self._dice("out")
        for part, row in zip(self._cut(self._vector.values), wire, strict=True):
            self._grain.encode(part, row, dice)
        if self._vector.residual is not None:
            rows = zip(self._cut(self._vector.values), self._cut(self._vector.residual), wire, strict=True)
            for part, left, row in rows:
                self._grain.decode(row, left)
                torch.sub(part, left, out=left)
        self._given = self._comm.exchange(list(wire))
        return Pending(self._arrive, lambda: False, self._arrived, self._answer)

    def _answer(self) -> None:
        """Sum the own slice and give it to all, once."""
        if self._gathered is None:
            self._gathered = self._sum(self._given.wait())

    def _sum(self, parts: Sequence[Tensor]) -> Pending[list[Tensor]]:
        rank, size = self._comm.rank, self._comm.size
        own = self._cut(self._vector.values)[rank]
        mean = self._room("mean", (self._length,), torch.float32)[: own.numel()]
        for i, part in enumerate(parts):
            self._grain.decode(part, mean, 1 / size, add=i > 0)
        row = self._room("row", (self._row,), torch.uint8)
        self._grain.encode(mean, row, self._dice("back"))
        if self._vector.residual is not None:
            left = self._cut(self._vector.residual)[rank]
            left.add_(mean, alpha=size)
            self._grain.decode(row, left, -size, add=True)
        return self._comm.gather(row)

    def _arrive(self) -> None:
        self._answer()
        assert self._gathered is not None
        for part, out in zip(self._gathered.wait(), self._cut(self._vector.values), strict=True):
            self._grain.decode(part, out)

    def _arrived(self) -> float:
        assert self._gathered is not None
        return self._gathered.arrived()

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """One slice for each rank; the last ones may be shorter, or empty."""
        return [
            flat[i * self._length : (i + 1) * self._length] if i * self._length < flat.numel() else flat[:0]
            for i in range(self._comm.size)
        ]

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._vector.scratch.room(name, shape, self._vector.values, dtype)
