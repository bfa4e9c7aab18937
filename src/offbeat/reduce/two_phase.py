"""The mean of a vector, slice by slice: each rank sums one slice in float32 and gives it to all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.comm.communicator import Communicator
from offbeat.comm.pending import Pending
from offbeat.reduce.codec import Codec
from offbeat.reduce.payload_split import Vector

_PIECES = 4  # at most
_PIECE = 2**16  # values, about, at least

Rng = Callable[[str], torch.Generator | None]


class TwoPhaseMean:
    """An all-to-all, a sum in rank order, an all-gather: the bytes of an all-reduce in this codec.

    Each value is rounded once on its way there, its mean once on the way back. All ranks decode the same
    bytes. The second rounding is charged to the residual of the rank that made it. TwoPhaseMean are coded in
    pieces: while the mean of one is on its way back the next is summed, or the one before decoded.
    """

    def __init__(self, vector: Vector, comm: Communicator, codec: Codec, rng: Rng) -> None:
        self._vector, self._comm, self._codec, self._rng = vector, comm, codec, rng
        units = -(-vector.values.numel() // (comm.size * codec.unit))
        self._length = units * codec.unit
        step = max(-(-units // _PIECES) * codec.unit, _PIECE // codec.unit * codec.unit)
        self._edges = [*range(0, self._length, step), self._length]
        self._gathered: list[Pending[list[Tensor]]] = []

    def send(self) -> Pending[None]:
        wire = self._room("wire", (self._comm.size, self._codec.size(self._length)), torch.uint8)
        rng = self._rng("out")
        for part, row in zip(self._cut(self._vector.values), wire, strict=True):
            for values, coded in self._pieces(part, row):
                self._codec.encode(values, coded, rng)
        self._given = self._comm.exchange(list(wire))
        if self._vector.residual is not None:
            rows = zip(self._cut(self._vector.values), self._cut(self._vector.residual), wire, strict=True)
            for part, left, row in rows:
                for out, coded in self._pieces(left, row):
                    self._codec.decode(coded, out)
                torch.sub(part, left, out=left)
        return Pending(self._arrive, lambda: False, self._arrived, self._answer)

    def _answer(self) -> None:
        """Sum the own slice and give it to all, once."""
        if self._gathered:
            return
        parts, rng = self._given.wait(), self._rng("back")
        rank, size = self._comm.rank, self._comm.size
        own = self._cut(self._vector.values)[rank]
        room = self._room("mean", (self._length,), torch.float32)[: own.numel()]
        row = self._room("row", (self._codec.size(self._length),), torch.uint8)
        heard = [[coded for _, coded in self._pieces(own, part)] for part in parts]
        for i, (mean, coded) in enumerate(self._pieces(room, row)):
            for j in range(size):
                self._codec.decode(heard[j][i], mean, 1 / size, add=j > 0)
            self._codec.encode(mean, coded, rng)
            self._gathered.append(self._comm.gather(coded))
        if self._vector.residual is not None:
            left = self._cut(self._vector.residual)[rank]
            left.add_(room, alpha=size)
            for out, coded in self._pieces(left, row):
                self._codec.decode(coded, out, -size, add=True)

    def _arrive(self) -> None:
        self._answer()
        slices = self._cut(self._vector.values)
        for i, message in enumerate(self._gathered):
            for part, coded in zip(slices, message.wait(), strict=True):
                self._codec.decode(coded, part[self._edges[i] : self._edges[i + 1]])

    def _arrived(self) -> float:
        return max(message.arrived() for message in self._gathered)

    def _pieces(self, part: Tensor, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A slice and its wire form, piece by piece; of a short slice the last ones may be empty."""
        size = self._codec.size
        return [(part[a:b], row[size(a) : size(b)]) for a, b in itertools.pairwise(self._edges)]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """One slice for each rank; the last ones may be shorter, or empty."""
        return [
            flat[i * self._length : (i + 1) * self._length] if i * self._length < flat.numel() else flat[:0]
            for i in range(self._comm.size)
        ]

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._vector.workspace.room(name, shape, self._vector.values, dtype)
