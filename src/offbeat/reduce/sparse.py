"""Codes that send some of the values: the largest and their positions, or one block of each tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.draws import draw_whole
from offbeat.comm.communicator import Communicator
from offbeat.reduce.code import Code, Messages
from offbeat.reduce.vectors import Vector

_WINDOW = 65536
_GROUP = 1024  # values that share one table of levels
_TILE = 2**20  # values searched at a time
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign


@dataclass(frozen=True, repr=False)
class TopK(Code):
    """The largest values in magnitude, one of every `ratio`, per tensor or per `chunk` of values.

    All ranks gather everyone's values and positions; values that a worker does not send count as zero. With
    bits=2, each group of 1 024 values is rounded to four levels; zeros stay zero. Larger `ratio` sends less;
    smaller `chunk` spreads the values sent more evenly. Use it with `ErrorFeedback`.

        offbeat.local_sgd(model, optimizer, reduce=ErrorFeedback(TopK(64)))
    """

    ratio: int
    chunk: int | None = None
    bits: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.ratio, 1):
            raise ValueError(f"{self!r}: ratio must be a whole number, at least 1.")
        fits = self.chunk is None or (is_whole(self.chunk, self.ratio) and self.chunk <= _WINDOW)
        if not fits or (self.chunk or 0) % 8:
            raise ValueError(f"{self}: chunk must be a multiple of 8, at least ratio and at most {_WINDOW}.")
        if self.bits not in (2, 32):
            raise ValueError(f"{self!r}: bits must be 32 or 2.")

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        starts, places = self._find(vector)
        number = places.numel()
        kept = vector.values.index_select(0, places)
        packed = pack_levels(kept) if self.bits == 2 else kept.view(torch.uint8)
        wire = torch.cat([self._pack_places(places, len(starts)), packed])
        mine = self._unpack_values(wire, number)
        if vector.residual is not None:
            vector.residual.copy_(vector.values)
            vector.residual.scatter_add_(0, places, -mine)
        vector.values.zero_()
        parts = yield comm.gather(wire)
        for rank, part in enumerate(parts):  # in rank order, so that sums are equal on all ranks
            own = rank == comm.rank
            where = places if own else self._unpack_places(part, number, starts)
            what = mine if own else self._unpack_values(part, number)
            vector.values.scatter_add_(0, where, what * (1 / comm.size))  # no position occurs twice

    def _find(self, vector: Vector) -> tuple[Tensor, Tensor]:
        """Return the start of each value's chunk, or of each window of 65 536 values, and the values' places.

        A shorter last chunk may send all its values.
        """
        values, chunk = vector.values, self.chunk
        if chunk is None:
            found = [
                start + largest(values[start:end].view(1, -1), max(1, (end - start) // self.ratio)).flatten()
                for _, start, end, _ in vector.spans
            ]
            starts = torch.arange(0, values.numel(), _WINDOW, device=values.device)
            return starts, torch.cat(found).sort().values
        k = max(1, chunk // self.ratio)
        rows, rest = divmod(values.numel(), chunk)
        found = [largest(values[: rows * chunk].view(rows, chunk), k).flatten()] if rows else []
        if rest:
            found.append(largest(values[rows * chunk :].view(1, rest), min(k, rest)).flatten())
        columns = torch.cat(found)
        numbers = torch.arange(columns.numel(), device=values.device)
        starts = numbers.div_(k, rounding_mode="floor").mul_(chunk)
        return starts, starts + columns

    def _pack_places(self, places: Tensor, windows: int) -> Tensor:
        """Pack positions in the chunk; or the count per window, and positions in the window."""
        inner = places % (self.chunk or _WINDOW)
        packed = pack12(inner) if self.chunk is not None and self.chunk <= 4096 else pack16(inner)
        packed = pad(packed, (0, -packed.numel() % 4))
        if self.chunk is not None:
            return packed
        counts = torch.bincount(places // _WINDOW, minlength=windows).to(torch.int32)
        return torch.cat([counts.view(torch.uint8), packed])

    def _unpack_places(self, wire: Tensor, number: int, starts: Tensor) -> Tensor:
        if self.chunk is None:
            counts, inner = torch.split(wire[: 4 * len(starts) + 2 * number], [4 * len(starts), 2 * number])
            return torch.repeat_interleave(starts, counts.view(torch.int32).long()) + unpack16(inner)
        if self.chunk <= 4096:
            return starts + unpack12(wire[: 3 * (-(-number // 2))], number)
        return starts + unpack16(wire[: 2 * number])

    def _unpack_values(self, wire: Tensor, number: int) -> Tensor:
        """Return the values, which are at the end of the wire."""
        size = 272 * (-(-number // 1024)) if self.bits == 2 else 4 * number
        part = wire[wire.numel() - size :]
        return unpack_levels(part, number) if self.bits == 2 else part.view(torch.float32)


@dataclass(frozen=True, repr=False)
class RandomBlock(Code):
    """One contiguous piece of each tensor, 1/`ratio` of it. It starts anywhere and may wrap around.

    The start depends on `seed`, round and name and is the same on all ranks, so no positions are sent and the
    pieces are averaged exactly. Values not sent count as zero. Use it with `ErrorFeedback` or `Detached`.
    Larger `ratio` sends less.

        offbeat.local_sgd(model, optimizer, reduce=ErrorFeedback(RandomBlock(64)))
    """

    ratio: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.ratio, 1):
            raise ValueError(f"{self!r}: ratio must be a whole number, at least 1.")

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        ends = []
        for span in vector.spans:
            length = max(1, (span.end - span.start) // self.ratio)
            first = span.start + draw_whole(self.seed, clock.round, span.name) % (span.end - span.start)
            over = max(0, first + length - span.end)  # values that wrap around
            ends.append((first, first + length - over))
            if over:
                ends.append((span.start, span.start + over))
        pieces = [vector.values[low:high] for low, high in ends]
        sent = torch.cat(pieces)
        if vector.residual is not None:
            vector.residual.copy_(vector.values)
            torch._foreach_zero_([vector.residual[low:high] for low, high in ends])
        vector.values.zero_()
        (mean,) = yield comm.mean([sent])
        torch._foreach_copy_(pieces, list(torch.split(mean, [high - low for low, high in ends])))


def largest(rows: Tensor, k: int) -> Tensor:
    """Return the columns of the k entries of largest magnitude in each float32 row, in any order.

    The bits of a float without its sign, read as a whole number, sort like the float. Whole numbers are
    searched faster, because none of them is NaN.
    """
    step = max(1, _TILE // rows.shape[1])
    tile = torch.empty_like(rows[:step], dtype=torch.int32)
    parts = torch.split(rows.view(torch.int32), step)
    return torch.cat([_largest(torch.bitwise_and(x, _MAGNITUDE, out=tile[: len(x)]), k) for x in parts])


def _largest(rows: Tensor, k: int) -> Tensor:
    number, length = rows.shape
    groups = length // 8
    if length % 8 or 2 * k > groups:
        return rows.topk(k, dim=1, sorted=False).indices
    # The k largest are in the k groups with the largest maxima: two short searches replace a long one.
    maxima = rows.view(number, 8, groups).amax(1)
    best = maxima.topk(k, dim=1, sorted=False).indices
    first = groups * torch.arange(8, device=rows.device).view(1, -1, 1)
    columns = (best.unsqueeze(1) + first).flatten(1)
    chosen = rows.gather(1, columns).topk(k, dim=1, sorted=False).indices
    return columns.gather(1, chosen)


def pack12(numbers: Tensor) -> Tensor:
    """Pack numbers below 4096, two in three bytes; an odd last one takes two bytes."""
    a, b = pad(numbers, (0, numbers.numel() % 2)).view(-1, 2).unbind(1)
    return torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], 1).to(torch.uint8).flatten()


def unpack12(wire: Tensor, length: int) -> Tensor:
    x, y, z = wire.view(-1, 3).int().unbind(1)
    return torch.stack([x | ((y & 15) << 8), (y >> 4) | (z << 4)], 1).flatten()[:length].long()


def pack16(numbers: Tensor) -> Tensor:
    """Pack numbers below 65536, two bytes each."""
    return numbers.to(torch.int16).view(torch.uint8)


def unpack16(wire: Tensor) -> Tensor:
    return wire.view(torch.int16).long() & 65535


def pack_levels(values: Tensor) -> Tensor:
    """Pack two bits per value: four equal bins over ±3σ of each group, and the mean of each bin.

    A group with zeros has one level for zero, so that they stay zero, and one for all values below it; its σ
    is that of the other values.
    """
    groups = -(-values.numel() // _GROUP)
    rows = pad(values, (0, groups * _GROUP - values.numel())).view(groups, _GROUP)
    real = (torch.arange(groups * _GROUP, device=values.device) < values.numel()).float().view(groups, _GROUP)
    top = rows.abs().amax(1, keepdim=True).clamp(min=2.0**-126)  # so that squares neither vanish nor overflow
    rows = rows / top
    zeros = real * (rows == 0)
    others = (real - zeros).sum(1, keepdim=True).clamp(min=1)
    edge = 1.5 * (rows.square().sum(1, keepdim=True) / others).sqrt()
    inner = torch.where(zeros.any(1, keepdim=True), rows > 0, rows >= -edge)
    bins = inner.to(torch.uint8) + (rows >= 0) + (rows >= edge)
    empty, places = torch.zeros(groups, 4, device=values.device), bins.long()
    sums, counts = empty.scatter_add(1, places, rows), empty.scatter_add(1, places, real)
    levels = top * (sums / counts.clamp(min=1))
    a, b, c, d = bins.view(-1, 4).unbind(1)
    return torch.cat([levels.flatten().view(torch.uint8), a | (b << 2) | (c << 4) | (d << 6)])


def unpack_levels(wire: Tensor, length: int) -> Tensor:
    groups = -(-length // _GROUP)
    levels, codes = wire[: 16 * groups].view(torch.float32).view(groups, 4), wire[16 * groups :]
    shifts = torch.arange(0, 8, 2, device=wire.device, dtype=torch.uint8)
    bins = ((codes.unsqueeze(1) >> shifts) & 3).view(groups, _GROUP).long()
    return levels.gather(1, bins).flatten()[:length]
