"""The mean, exact or of values that are rounded to fewer bits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.draws import draw_whole
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending, join_messages
from offbeat.reduce.code import Code, Messages
from offbeat.reduce.vectors import Residual, Vector
from offbeat.reduce.wire import WORD, BlockCodec, CastCodec

_codec = functools.cache(BlockCodec)  # a codec caches its width
_HEAD, _GROWTH = 2**18, 64  # values of the first piece of a payload; how much longer the next one is
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PIECES = 4  # of a slice, at most
_PIECE = 2**17  # values of a piece, roughly, at least
_SHORT = 2**20  # values; in a shorter vector, one more call costs more than one more slice
_BLOCKS = {8: 256, 4: 32, 3: 32, 2: 32}  # values that share a scale, by bits


@dataclass(frozen=True, repr=False)
class Mean(Code):
    """The exact mean in float32, or in float64 for float64 tensors.

    With `dtype` "bfloat16" or "float16", half the bytes are sent; sums are still float32.

        offbeat.diloco(model, optimizer, reduce=Mean("bfloat16"))
    """

    dtype: str | torch.dtype | None = None

    messages, carries_exact, gradient_decay, gradient_limit = 2, True, 0.5, 0.5  # in half precision

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.dtype if self.dtype is None else str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", name)
        if name is not None and name not in _NARROW:
            raise ValueError(f'{self}: dtype must be "bfloat16", "float16", or left out for full precision.')
        object.__setattr__(self, "lossy", name is not None)
        if name is not None:
            object.__setattr__(self, "most", torch.finfo(_NARROW[name]).max)

    def __repr__(self) -> str:
        return super().__repr__() if self.dtype else "Mean()"

    def start(
        self, payload: Packed, comm: Communicator, clock: Clock, state: State, residual: Residual = None
    ) -> Pending[Packed]:
        if self.dtype is not None:
            return super().start(payload, comm, clock, state, residual)
        for flat in residual or ():
            flat.zero_()
        return send(payload, comm)

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        return mean_in_two_phases(vector, comm, CastCodec(_NARROW[str(self.dtype)]))


def send(payload: Packed, comm: Communicator, live: Sequence[Tensor] = ()) -> Pending[Packed]:
    """Send a payload and return its exact mean. `live` are packed first, as its first entries.

    A long payload is sent in pieces: the second is packed while the first is in flight. The second is much
    longer: gloo moves one long vector faster than many short ones, and memory is faster than the network.
    """
    own, short = payload.cut(len(live))[0], sum(map(torch.numel, payload.flats)) < 4 * _HEAD
    if short or own.is_memory_of(live):
        own.read(live)
        return comm.total(payload.flats).then(lambda _: payload.scaled(1 / comm.size))
    messages = []
    for piece, inside in payload.pieces(_HEAD, _GROWTH):
        if packed := [i for i in inside if i < len(live)]:
            torch._foreach_copy_([payload.views[i] for i in packed], [live[i] for i in packed])
        messages.append(comm.total([piece]))
    return join_messages(messages).then(lambda _: payload.scaled(1 / comm.size))


@dataclass(frozen=True, repr=False)
class Quantized(Code):
    """Blocks of `block` values as whole numbers of 8, 4, 3 or 2 bits times one scale.

        q = s·n        n from −2^(bits−1) to 2^(bits−1) − 1

    The value of largest magnitude in a block becomes the lowest number, whatever its sign, because the scale
    s has a sign as well. Smaller blocks lose less and send more scales, 2 bytes each. The default is 32
    values, or 256 with 8 bits. `stochastic` rounds at random, so that the error is zero on average; the draws
    depend on `seed`, round and rank. Sums are float32. Below 8 bits use `ErrorFeedback`, which later sends
    what was lost.

        offbeat.ddp(model, optimizer, reduce=ErrorFeedback(Quantized(4)))
    """

    bits: int = 8
    block: int | None = None
    stochastic: bool = False
    seed: int = 0

    messages, carries_exact, gradient_decay, gradient_limit = 2, True, 0.5, 0.5
    most = 2.0**127  # so that the numbers next to it are finite too

    def __post_init__(self) -> None:
        known = isinstance(self.bits, int) and self.bits in _BLOCKS
        if self.block is None and known:
            object.__setattr__(self, "block", _BLOCKS[self.bits])
        super().__post_init__()
        if not known:
            raise ValueError(f"{self!r}: bits must be 8, 4, 3 or 2.")
        step = 16 if self.bits == 3 else 8
        if not is_whole(self.block, step) or self.block % step:
            raise ValueError(f"{self!r}: block must be a multiple of {step}.")

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        assert self.block is not None
        codec = _codec(self.bits, self.block)
        if not self.stochastic:
            return mean_in_two_phases(vector, comm, codec)
        key = (self.seed, clock.step, clock.round, vector.spans[0].name, comm.rank)
        seeds, device = [draw_whole(*key, way) % 2**63 for way in ("out", "back")], vector.values.device
        rngs = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        return mean_in_two_phases(vector, comm, codec, rngs)


def mean_in_two_phases(
    vector: Vector,
    comm: Communicator,
    codec: CastCodec | BlockCodec,
    rngs: Sequence[torch.Generator | None] = (None, None),
) -> Messages:
    """An all-to-all, a sum and an all-gather: as many bytes as an all-reduce in this codec.

    Each rank sums one slice in float32 and sends the mean to all. The values of the other ranks are rounded
    once before the sum; its own are not. The mean is rounded once, and the rank that rounds it keeps the
    error in its residual, in its own slice, which is not rounded again. All ranks decode the same bytes. Long
    slices are coded in pieces: while the mean of one piece is in flight, the next is summed.
    """
    key = (codec, comm.size, comm.rank)
    if key not in vector.plans:
        vector.plans[key] = Phases(vector, comm, codec)
    phases: Phases = vector.plans[key]
    parts = yield comm.exchange(phases.encode(rngs[0]))
    messages = phases.send_mean(parts, comm, rngs[1])
    for piece, message in zip(phases.pieces, messages, strict=True):
        phases.decode(piece, (yield message))


class Piece(NamedTuple):
    """A part of every slice."""

    values: slice  # of a slice
    coded: slice  # the bytes of these values, after the head of a wire
    out: Sequence[Sequence[Tensor]]  # the opened bytes on the wire to each group of ranks
    back: Sequence[Tensor]  # the opened bytes on the wire to all ranks


class Phases:
    """One vector's slices, and views of its wires. They stay the same from round to round."""

    def __init__(self, vector: Vector, comm: Communicator, codec: CastCodec | BlockCodec) -> None:
        self._codec, self._rank, self._exact = codec, comm.rank, vector.exact
        size, unit, width = comm.size, codec.unit, codec.width
        units = -(-vector.values.numel() // (size * unit))
        slices = Slices(vector.values, units * unit)
        left = None if vector.residual is None else Slices(vector.residual, units * unit)
        own = slice(comm.rank, comm.rank + 1)
        apart, self._all, self._own = slices.groups(apart=comm.rank), slices.groups(), slices.group(own)
        self._out = [(group, None if left is None else left.group(group.ranks)) for group in apart]
        self._left = None if left is None else left.group(own)
        self._head, unaligned = (0, 0) if self._exact is None else (self._exact.nbytes, -units * width % WORD)
        end = self._head + units * width
        self._wire = vector.buffer("wire", (size, end + unaligned), torch.uint8)
        self._chunks, self._row = list(self._wire), vector.buffer("row", (end,), torch.uint8)
        coded, row = self._wire[:, self._head : end], self._row[self._head :].unsqueeze(0)
        edges = [*range(0, units, max(-(-units // _PIECES), _PIECE // unit)), units]
        self.pieces = list[Piece]()
        for a, b in itertools.pairwise(edges):
            at = slice(a * width, b * width)
            out = [codec.open(coded[group.ranks, at]) for group in apart]
            self.pieces.append(Piece(slice(a * unit, b * unit), at, out, codec.open(row[:, at])))

    def encode(self, rng: torch.Generator | None) -> list[Tensor]:
        """Return what each rank gets of this rank's values."""
        for i, (group, left) in enumerate(self._out):
            values, lost = group.read(), None if left is None else left.read()
            for piece in self.pieces:
                room = None if lost is None else lost[:, piece.values]
                self._codec.encode(values[:, piece.values], piece.out[i], rng, room)
            if left is not None and lost is not None:
                left.write(lost)
        if self._exact is not None:
            self._exact.write(self._wire)
        return self._chunks

    def send_mean(
        self, parts: Sequence[Tensor], comm: Communicator, rng: torch.Generator | None
    ) -> list[Pending[list[Tensor]]]:
        """Sum this rank's slice of all ranks' values, and send the mean, piece by piece."""
        others = [*parts[: self._rank], *parts[self._rank + 1 :]]
        mean, head, sent = self._own.read().mul_(1 / comm.size), self._head, 0
        error, messages = None if self._left is None else torch.empty_like(mean), []
        if self._exact is not None:
            self._exact.reduce(parts, self._row)
        for piece in self.pieces:
            start, end = head + piece.coded.start, head + piece.coded.stop
            self._codec.add([part[start:end] for part in others], mean[0, piece.values], 1 / comm.size)
            room = None if error is None else error[:, piece.values]
            self._codec.encode(mean[:, piece.values], piece.back, rng, room)
            messages.append(comm.gather(self._row[sent:end]))
            sent = end
        if self._left is not None and error is not None:
            self._left.write(error.mul_(comm.size))
        return messages

    def decode(self, piece: Piece, parts: Sequence[Tensor]) -> None:
        """Replace the values of a piece by the mean that all ranks have sent."""
        rows = torch.stack(list(parts))
        if self._exact is not None and piece.coded.start == 0:
            self._exact.read(rows)
        for group in self._all:
            values = group.read()
            coded = rows[group.ranks, piece.coded.start - piece.coded.stop :]
            self._codec.decode(self._codec.open(coded), values[:, piece.values])
            group.write(values)


class Group:
    """The slices of some neighbouring ranks, as rows of a matrix."""

    def __init__(self, part: Tensor, length: int, ranks: slice) -> None:
        """`part` is the ranks' part of the vector, which may end before the last slice does."""
        self.ranks, self._part, self._length = ranks, part, length
        self._missing = (ranks.stop - ranks.start) * length - part.numel()
        self._rows = None if self._missing else part.view(-1, length)

    def read(self) -> Tensor:
        """Return the rows: the vector's own memory, or a copy padded with zeros."""
        if self._rows is not None:
            return self._rows
        return torch.nn.functional.pad(self._part, (0, self._missing)).view(-1, self._length)

    def write(self, rows: Tensor) -> None:
        """Copy rows into the vector, unless they are its memory."""
        if rows is not self._rows:
            self._part.copy_(rows.view(-1)[: self._part.numel()])


class Slices:
    """A vector cut into slices of one length, one per rank. The last may be short; some ranks may have none.

    A short vector is coded in few calls: each group of ranks from `groups` is a matrix of several slices.
    """

    def __init__(self, flat: Tensor, length: int) -> None:
        self._flat, self._length = flat, length
        self._whole, rest = divmod(flat.numel(), length)
        self._all = self._whole + (rest > 0)

    def groups(self, apart: int | None = None) -> list[Group]:
        """Return groups of slices that share a call. In a long vector, the slice of rank `apart` is left
        out."""
        edges = [0, self._whole, self._all]
        if apart is not None and (self._flat.numel() > _SHORT or apart >= self._whole):
            edges = sorted({*edges, apart, apart + 1})
        ranges = [slice(a, b) for a, b in itertools.pairwise(edges) if a < b <= self._all]
        return [self.group(ranks) for ranks in ranges if (ranks.start, ranks.stop - 1) != (apart, apart)]

    def group(self, ranks: slice) -> Group:
        part = self._flat[ranks.start * self._length : ranks.stop * self._length]
        return Group(part, self._length, ranks)
