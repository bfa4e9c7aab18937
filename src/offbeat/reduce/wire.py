"""Wire formats: how rounded values, and a few exact ones beside them, are written to bytes and read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offbeat.comm.collective import sum_in_order

_TILE = 2**18  # values that a CPU processes at a time, so that they stay in its cache between passes
_GPU_TILE = 2**24
_TINY = 2.0**-126  # the smallest scale: its inverse is finite
WORD = 8  # bytes
_WORDS = {8: torch.int8, 4: torch.int16, 3: torch.int64, 2: torch.int32}  # into which numbers are packed


@dataclass(frozen=True)
class CastCodec:
    """The wire format of vectors in a narrower floating type: `unit` values take `width` bytes.

    Vectors are along the last dimension and consist of whole units. `open` returns views of a wire's bytes,
    for `encode` and `decode`. `encode` writes the values to the wire, and what they lose to `left`. `decode`
    writes the decoded values to `out`. `add` adds the values of several wires, times `factor`, to one vector,
    in order.
    """

    dtype: torch.dtype

    unit, width = 2, 4

    def open(self, wire: Tensor) -> tuple[Tensor, ...]:
        return (wire.view(self.dtype),)

    def encode(
        self,
        values: Tensor,
        wire: Sequence[Tensor],
        rng: torch.Generator | None = None,
        left: Tensor | None = None,
    ) -> None:
        narrow = wire[0].copy_(values)
        if left is not None:
            torch.sub(values, narrow, out=left)

    def decode(self, wire: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(wire[0])

    def add(self, wires: Sequence[Tensor], out: Tensor, factor: float) -> None:
        rows = torch.unflatten(out, -1, (-1, self.unit))
        for room, *parts in _tiles(rows, *[wire.view(self.dtype).view(rows.shape) for wire in wires]):
            for part in parts:
                room.add_(part.float(), alpha=factor)


@dataclass(frozen=True)
class BlockCodec:
    """Whole numbers of `bits` bits times one scale per block of `unit` values: all numbers, then the scales.

    Numbers go from −2^(bits−1) to 2^(bits−1) − 1. The scale is a bfloat16 with a sign, chosen so that the
    value of largest magnitude becomes the lowest number. `encode` rounds to the nearest number or, with
    `rng`, at random and without bias. A number times its scale is exact in float32.
    """

    bits: int
    unit: int

    @cached_property
    def width(self) -> int:
        return self.unit * self.bits // 8 + 2

    def open(self, wire: Tensor) -> tuple[Tensor, ...]:
        """Return the bytes of the numbers, in planes (see `pack`), and the scales. Blocks are along the last
        dimension but one."""
        blocks, planes = wire.shape[-1] // self.width, 3 if self.bits == 3 else 1
        cut = wire.shape[-1] - 2 * blocks
        codes = torch.unflatten(wire[..., :cut], -1, (planes, blocks, -1)).movedim(-3, 0)
        return codes, wire[..., cut:].view(torch.bfloat16).unsqueeze(-1)

    def encode(
        self,
        values: Tensor,
        wire: Sequence[Tensor],
        rng: torch.Generator | None = None,
        left: Tensor | None = None,
    ) -> None:
        rows, (codes, scales) = torch.unflatten(values, -1, (-1, self.unit)), wire
        losses = () if left is None else (torch.unflatten(left, -1, (-1, self.unit)),)
        scale = find_scales(rows, self.bits, at_random=rng is not None)
        scales.copy_(scale)
        for part, room, own, inverse, *lost in _tiles(rows, codes, scale, scale.reciprocal(), *losses):
            numbers = torch.mul(part, inverse)
            if rng is None:
                numbers.round_()
            else:
                numbers.add_(torch.rand(numbers.shape, generator=rng, device=numbers.device)).floor_()
                numbers.clamp_(max=2 ** (self.bits - 1) - 1)  # the addition may have rounded up
            for loss in lost:
                torch.addcmul(part, numbers, own, value=-1, out=loss)
            pack(numbers.to(torch.int8), room, self.bits)

    def decode(self, wire: Sequence[Tensor], out: Tensor) -> None:
        codes, scales = wire
        rows = torch.unflatten(out, -1, (-1, self.unit))
        for room, part, factors in _tiles(rows, codes, scales.float()):
            torch.mul(unpack(part, self.bits), factors, out=room)

    def add(self, wires: Sequence[Tensor], out: Tensor, factor: float) -> None:
        rows = torch.unflatten(out, -1, (-1, self.unit))
        codes, scales = self.open(torch.stack(list(wires)))
        for room, part, factors in _tiles(rows, codes, scales.float().mul_(factor), copies=len(wires)):
            for numbers, own in zip(unpack(part, self.bits), factors, strict=True):
                room.addcmul_(numbers, own)


def _tiles(rows: Tensor, *others: Tensor, copies: int = 1) -> Iterator[Sequence[Tensor]]:
    """Yield these tensors in ranges of blocks, their last dimension but one, that fit a processor's cache."""
    *outer, blocks, unit = rows.shape
    values = _TILE if rows.device.type == "cpu" else _GPU_TILE
    size = max(1, values // (unit * copies * math.prod(outer)))
    if blocks <= size:
        yield rows, *others
        return
    for start in range(0, blocks, size):
        yield [part.narrow(-2, start, min(size, blocks - start)) for part in (rows, *others)]


def find_scales(rows: Tensor, bits: int, *, at_random: bool) -> Tensor:
    """Return the scale of each row: the smallest in bfloat16 with which no number is out of range.

    The value of largest magnitude may become −2^(bits−1), one of the other sign 2^(bits−1) − 1. Rounding to
    the nearest lets it exceed that number by almost one half.
    """
    top, bottom = rows.amax(-1, keepdim=True), rows.amin(-1, keepdim=True).neg_()
    low = 2 ** (bits - 1)
    high = low - (1 if at_random else 0.51)
    least = torch.minimum(top, bottom).div_(high)
    scale = torch.maximum(top, bottom).div_(low).maximum(least).clamp_(min=_TINY)
    up = scale.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)  # to a bfloat16
    return torch.where(top >= bottom, -up, up)


def pack(numbers: Tensor, planes: Tensor, bits: int) -> None:
    """Write whole numbers, one per byte, into bytes without gaps. The numbers are overwritten.

    Eight numbers of 3 bits take three bytes, each in its own plane. Bytes are moved as words: neighbours are
    joined, then neighbouring pairs, until all numbers of a word are at its end.
    """
    if bits == 8:
        planes[0].view(torch.int8).copy_(numbers)
        return
    words = numbers.add_(2 ** (bits - 1)).view(_WORDS[bits])
    for size in _sizes(bits):
        words.bitwise_or_(words >> (8 - bits) * size).bitwise_and_(_mask(bits, 2 * size))
    planes[0].copy_(words)
    for i in range(1, len(planes)):
        planes[i].copy_(words >> 8 * i)


def unpack(planes: Tensor, bits: int) -> Tensor:
    """Return the whole numbers in these bytes, one per byte."""
    if bits == 8:
        return planes[0].view(torch.int8)
    words = planes[0].to(_WORDS[bits])
    for i in range(1, len(planes)):
        words.bitwise_or_(planes[i].to(words.dtype) << 8 * i)
    for size in reversed(_sizes(bits)):
        words.bitwise_or_(words << (8 - bits) * size).bitwise_and_(_mask(bits, size))
    return words.view(torch.int8).sub_(2 ** (bits - 1))


def _sizes(bits: int) -> list[int]:
    """Return how many numbers are joined with as many in each step: 1, 2, … up to half a word."""
    return [size for size in (1, 2, 4) if size < _WORDS[bits].itemsize]


def _mask(bits: int, size: int) -> int:
    """Return a mask for runs of `size` numbers without gaps, each at the start of as many bytes."""
    run = (1 << bits * size) - 1
    return sum(run << 8 * start for start in range(0, _WORDS[bits].itemsize, size))


class ExactSlices:
    """Short vectors that travel exactly at the head of a code's two messages, and one word from each rank.

    Each rank sums one slice of every vector, in rank order, and sends the mean to all. The word comes first.
    Everything is aligned to words.
    """

    def __init__(self, flats: Sequence[Tensor], size: int) -> None:
        self.word, self._size = 0, size
        self._places: list[tuple[Tensor, int, int, int]] = []  # a vector, the length and the bytes of a slice
        self.nbytes = WORD
        for flat in [flat for flat in flats if flat.numel()]:
            length = -(-flat.numel() // size)
            start, self.nbytes = self.nbytes, self.nbytes + length * flat.element_size()
            self._places.append((flat, length, start, self.nbytes))
            self.nbytes += -self.nbytes % WORD

    def write(self, wire: Tensor) -> None:
        """Write what each rank gets into the rows of the wire."""
        wire[:, :WORD].view(torch.int64).fill_(self.word)
        for flat, length, start, end in self._places:
            padded = torch.nn.functional.pad(flat, (0, self._size * length - flat.numel()))
            wire[:, start:end].view(flat.dtype).copy_(padded.view(self._size, length))

    def words(self, parts: Sequence[Tensor]) -> list[int]:
        """Return the word of each rank, from what has arrived of `write`."""
        return torch.stack([part[:WORD] for part in parts]).view(torch.int64).flatten().tolist()

    def reduce(self, parts: Sequence[Tensor], row: Tensor) -> None:
        """Write the means of this rank's slices into the row that all ranks get."""
        for flat, _, start, end in self._places:
            total = sum_in_order(torch.stack([part[start:end] for part in parts]).view(flat.dtype).unbind())
            row[start:end].view(flat.dtype).copy_(total.mul_(1 / self._size))

    def read(self, rows: Tensor) -> None:
        """Replace the vectors by the means that all ranks have sent."""
        for flat, _, start, end in self._places:
            flat.copy_(rows[:, start:end].contiguous().view(flat.dtype).view(-1)[: flat.numel()])
