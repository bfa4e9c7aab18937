"""The mean of a vector in two messages: each rank sums one slice in float32 and sends it to all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Vector
from offbeat.reduce.codec import Codec
from offbeat.reduce.reducer import Staged

_PIECES = 4  # at most
_PIECE = 2**16  # values, about, at least

Rng = Callable[[str], torch.Generator | None]


class TwoPhaseMean:
    """An all-to-all, a sum in rank order, an all-gather: the bytes of an all-reduce in this codec.

    Each value is rounded once before the sum, each mean once after it. All ranks decode the same bytes. The
    second rounding is charged to the residual of the rank that made it. Slices are coded in pieces: while the
    mean of one piece travels, the next is summed or the one before decoded.
    """

    def __init__(self, vector: Vector, comm: Communicator, codec: Codec, rng: Rng) -> None:
        self._vector, self._comm, self._codec, self._rng = vector, comm, codec, rng
        units = -(-vector.values.numel() // (comm.size * codec.unit))
        self._length = units * codec.unit
        step = max(-(-units // _PIECES) * codec.unit, _PIECE // codec.unit * codec.unit)
        self._edges = [*range(0, self._length, step), self._length]
        self._gathered: list[Pending[list[Tensor]]] = []

    def send(self) -> Staged[None]:
        vector, codec = self._vector, self._codec
        shape = (self._comm.size, codec.size(self._length))
        wire = vector.buffer("wire", shape, torch.uint8)
        rng, slices = self._rng("out"), self._cut(vector.values)
        for part, row in zip(slices, wire, strict=True):
            for values, coded in self._pieces(part, row):
                codec.encode(values, coded, rng)
        self._given = self._comm.exchange(list(wire))
        if vector.residual is not None:
            for part, left, row in zip(slices, self._cut(vector.residual), wire, strict=True):
                for out, coded in self._pieces(left, row):
                    codec.decode(coded, out)
                torch.sub(part, left, out=left)
        return Staged(
            [self._answer], self._decode, lambda: max([message.arrived() for message in self._gathered])
        )

    def _answer(self) -> None:
        """Sum this rank's slice and send the mean to all."""
        parts, rng = self._given.wait(), self._rng("back")
        vector, codec, rank, size = self._vector, self._codec, self._comm.rank, self._comm.size
        own = self._cut(vector.values)[rank]
        mean = vector.buffer("mean", (self._length,), torch.float32)[: own.numel()]
        row = vector.buffer("row", (codec.size(self._length),), torch.uint8)
        heard = [[coded for _, coded in self._pieces(own, part)] for part in parts]
        for i, (piece, coded) in enumerate(self._pieces(mean, row)):
            for j in range(size):
                codec.decode(heard[j][i], piece, 1 / size, add=j > 0)
            codec.encode(piece, coded, rng)
            self._gathered.append(self._comm.gather(coded))
        if vector.residual is not None:
            left = self._cut(vector.residual)[rank]
            left.add_(mean, alpha=size)
            for out, coded in self._pieces(left, row):
                codec.decode(coded, out, -size, add=True)

    def _decode(self) -> None:
        slices = self._cut(self._vector.values)
        for i, message in enumerate(self._gathered):
            for part, coded in zip(slices, message.wait(), strict=True):
                self._codec.decode(coded, part[self._edges[i] : self._edges[i + 1]])

    def _pieces(self, part: Tensor, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A slice and its wire form, piece by piece; the last pieces of a short slice may be empty."""
        size = self._codec.size
        return [(part[a:b], row[size(a) : size(b)]) for a, b in itertools.pairwise(self._edges)]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """One slice for each rank; the last ones may be shorter, or empty."""
        return [
            flat[i * self._length : (i + 1) * self._length] if i * self._length < flat.numel() else flat[:0]
            for i in range(self._comm.size)
        ]
