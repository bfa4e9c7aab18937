"""The mean, exact or of values rounded to fewer bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Messages, Residual, Vector
from offbeat.reduce.wire import BlockCodec, CastCodec

_HEAD, _GROWTH = 2**18, 64  # values of the first piece of a payload; how much longer the next one is
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BLOCKS = {8: 256, 4: 32, 3: 32, 2: 32}  # values that share a scale, by bits
_PIECES = 4  # at most
_PIECE = 2**17  # values, about, at least
_SHORT = 2**20  # values of a vector from which on the time of a call matters less than a copy


@dataclass(frozen=True, repr=False)
class Mean(Code):
    """The exact mean in float32, or in float64 for float64 tensors.

    With `dtype` "bfloat16" or "float16" half the bytes travel; sums are still float32.

        offbeat.diloco(model, optimizer, reduce=Mean("bfloat16"))
    """

    dtype: str | torch.dtype | None = None

    messages = 2  # in half precision

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
    """Send a payload; its exact mean arrives. `live` are packed first, as its first entries.

    A long payload goes in pieces, and the next one is packed while the first travels. It is much longer:
    gloo moves one long vector faster than many short ones, and memory is faster than the network.
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

    def wait() -> Packed:
        for message in messages:
            message.wait()
        return payload.scaled(1 / comm.size)

    return Pending(wait, lambda: all(m.done() for m in messages), lambda: max(m.arrived() for m in messages))


@dataclass(frozen=True, repr=False)
class Quantized(Code):
    """Blocks of `block` values as whole numbers of 8, 4, 3 or 2 bits times one scale.

        q = s·n        n from −2^(bits−1) to 2^(bits−1) − 1

    The value of largest magnitude in a block becomes the lowest number, whatever its sign: the scale s has
    one too. Smaller blocks lose less and send more scales, 2 bytes each. The default is 32 values, or 256
    with 8 bits. `stochastic` rounds at random, so that the error is zero on average; the draws depend on
    `seed`, round and rank. Sums are float32. Below 8 bits use `ErrorFeedback`, so that nothing is lost for
    good.

        offbeat.ddp(model, optimizer, reduce=ErrorFeedback(Quantized(4)))
    """

    bits: int = 8
    block: int | None = None
    stochastic: bool = False
    seed: int = 0

    messages = 2
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
        codec = BlockCodec(self.bits, self.block)
        if not self.stochastic:
            return mean_in_two_phases(vector, comm, codec)
        key = (self.seed, clock.step, clock.round, vector.spans[0].name, comm.rank)
        seeds, device = [whole(*key, way) % 2**63 for way in ("out", "back")], vector.values.device
        rngs = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        return mean_in_two_phases(vector, comm, codec, rngs)


def mean_in_two_phases(
    vector: Vector,
    comm: Communicator,
    codec: CastCodec | BlockCodec,
    rngs: Sequence[torch.Generator | None] = (None, None),
) -> Messages:
    """An all-to-all, a sum, an all-gather: the bytes of an all-reduce in this codec.

    Each rank sums one slice in float32 and sends the mean to all. The values of the others are rounded once
    before the sum, its own are not. The mean is rounded once; the rank that rounds it keeps the error in its
    residual, which is in its own slice and thus not rounded again. All ranks decode the same bytes. Long
    slices are coded in pieces: while the mean of one piece travels, the next is summed.
    """
    size, unit, width, residual = comm.size, codec.unit, codec.width, vector.residual
    units = -(-vector.values.numel() // (size * unit))
    edges = [*range(0, units, max(-(-units // _PIECES), _PIECE // unit)), units]
    pieces = [(slice(a * unit, b * unit), slice(a * width, b * width)) for a, b in itertools.pairwise(edges)]
    slices = Slices(vector, vector.values, size, units * unit)
    left = None if residual is None else Slices(vector, residual, size, units * unit, read=False)
    wire = vector.buffer("wire", (size, units * width), torch.uint8)
    for ranks, values in slices.groups(apart=comm.rank):
        for inside, coded in pieces:
            lost = None if left is None else left[ranks][:, inside]
            codec.encode(values[:, inside], wire[ranks, coded], rngs[0], lost)
    parts = yield comm.exchange(list(wire))
    parts = [part for rank, part in enumerate(parts) if rank != comm.rank]
    own = slice(comm.rank, comm.rank + 1)
    mean, row = slices[own].mul_(1 / size), vector.buffer("row", (1, units * width), torch.uint8)
    messages = []
    for inside, coded in pieces:
        codec.add([part[coded] for part in parts], mean[0, inside], 1 / size)
        codec.encode(mean[:, inside], row[:, coded], rngs[1], None if left is None else left[own][:, inside])
        messages.append(comm.gather(row[0, coded]))
    if left is not None:
        left[own].mul_(size)
        left.write()
    for (inside, _), message in zip(pieces, messages, strict=True):
        rows = torch.stack((yield message))
        for ranks, values in slices.groups():
            codec.decode(rows[ranks], values[:, inside])
    slices.write()


class Slices:
    """A vector cut into one slice per rank, all of the same length, with zeros after its end.

    A short vector is copied into one matrix, whose slices are coded in one call. A long one stays where it
    is, but for the slice that contains its end and those after it. `write` copies back what was copied.
    """

    def __init__(self, vector: Vector, flat: Tensor, size: int, length: int, *, read: bool = True) -> None:
        self._flat, self._length, self._size = flat, length, size
        self._inside = 0 if flat.numel() < _SHORT else flat.numel() // length  # slices that stay
        name = "slices" if read else "losses"
        self._room = vector.buffer(name, (size - self._inside, length), flat.dtype)
        self._end = flat[self._inside * length :]
        self._copy = self._room.view(-1)[: self._end.numel()]
        if read:
            self._copy.copy_(self._end)

    def __getitem__(self, ranks: slice) -> Tensor:
        """The slices of these ranks, which are all in the vector or all copied, as a matrix."""
        if ranks.stop <= self._inside:
            return self._flat[ranks.start * self._length : ranks.stop * self._length].view(-1, self._length)
        return self._room[ranks.start - self._inside : ranks.stop - self._inside]

    def groups(self, apart: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Ranks and their slices, as many as one call can take; single ones without rank `apart`."""
        for rank in range(self._inside):
            if rank != apart:
                yield slice(rank, rank + 1), self[rank : rank + 1]
        alone = self._size - self._inside == 1 and apart == self._inside
        if self._inside < self._size and not alone:
            yield slice(self._inside, self._size), self._room

    def write(self) -> None:
        """Copy back what was copied."""
        self._end.copy_(self._copy)
