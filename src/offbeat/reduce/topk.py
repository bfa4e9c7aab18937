"""The largest values and their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.bitpack import pack12, pack16, pack_levels, unpack12, unpack16, unpack_levels
from offbeat.reduce.code import Code, Vector
from offbeat.reduce.largest import largest

_WINDOW = 65536


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
        check_ratio(self, self.ratio)
        if self.chunk is not None and not (
            isinstance(self.chunk, int) and self.ratio <= self.chunk <= _WINDOW and self.chunk % 8 == 0
        ):
            raise ValueError(
                f"{self!r}: chunk must be a multiple of 8, at least ratio and at most {_WINDOW}."
            )
        if self.bits not in (2, 32):
            raise ValueError(f"{self!r}: bits must be 32 or 2.")

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Pending[None]:
        starts = self._find_starts(vector.values)
        places = (
            self._find_in_tensors(vector)
            if self.chunk is None
            else starts + self._find_in_chunks(vector, self.chunk)
        )
        number = places.numel()
        kept = vector.values.index_select(0, places)
        wire = torch.cat([self._pack_places(places, len(starts)), self._pack_values(kept)])
        mine = self._unpack_values(wire, number)
        if vector.residual is not None:
            vector.residual.copy_(vector.values)
            vector.residual.scatter_add_(0, places, -mine)
        vector.values.zero_()

        def arrive(parts: list[Tensor]) -> None:
            for rank, part in enumerate(parts):  # in rank order, so that all sums are the same everywhere
                own = rank == comm.rank
                where = places if own else self._unpack_places(part, number, starts)
                what = mine if own else self._unpack_values(part, number)
                vector.values.scatter_add_(0, where, what * (1 / comm.size))  # no position occurs twice

        return comm.gather(wire).then(arrive)

    def _find_in_tensors(self, vector: Vector) -> Tensor:
        """The positions of the largest values of each tensor, in order."""
        found = [
            span.start
            + largest(vector.values[span.start : span.end].view(1, -1), _count(span.size, self.ratio))
            for span in vector.spans
        ]
        return torch.cat(found, 1).flatten().sort().values

    def _find_in_chunks(self, vector: Vector, chunk: int) -> Tensor:
        """The positions of the largest values within each chunk; a shorter last chunk may send all it has."""
        values, k = vector.values, _count(chunk, self.ratio)
        rows = values.numel() // chunk
        found = [largest(values[: rows * chunk].view(rows, chunk), k)] if rows else []
        if rest := values.numel() % chunk:
            found.append(largest(values[rows * chunk :].view(1, rest), min(k, rest)))
        return torch.cat([columns.flatten() for columns in found])

    def _find_starts(self, values: Tensor) -> Tensor:
        """The start of the chunk of each value sent, or of each window of 65 536 values."""
        if self.chunk is None:
            return torch.arange(0, values.numel(), _WINDOW, device=values.device)
        k = _count(self.chunk, self.ratio)
        number = k * (values.numel() // self.chunk) + min(k, values.numel() % self.chunk)
        return torch.arange(number, device=values.device).div_(k, rounding_mode="floor").mul_(self.chunk)

    def _pack_places(self, places: Tensor, windows: int) -> Tensor:
        """The position in the chunk; or the count per window, and the position in the window."""
        if self.chunk is not None:
            inner = places % self.chunk
            return _align(pack12(inner) if self.chunk <= 4096 else pack16(inner))
        counts = torch.bincount(places // _WINDOW, minlength=windows).to(torch.int32)
        return torch.cat([counts.view(torch.uint8), _align(pack16(places % _WINDOW))])

    def _unpack_places(self, wire: Tensor, number: int, starts: Tensor) -> Tensor:
        if self.chunk is None:
            counts, inner = torch.split(wire[: 4 * len(starts) + 2 * number], [4 * len(starts), 2 * number])
            return torch.repeat_interleave(starts, counts.view(torch.int32).long()) + unpack16(inner)
        size = 3 * (-(-number // 2)) if self.chunk <= 4096 else 2 * number
        return starts + (unpack12(wire[:size], number) if self.chunk <= 4096 else unpack16(wire[:size]))

    def _pack_values(self, values: Tensor) -> Tensor:
        return pack_levels(values) if self.bits == 2 else values.view(torch.uint8)

    def _unpack_values(self, wire: Tensor, number: int) -> Tensor:
        """The values, which are at the end of the wire."""
        size = 272 * (-(-number // 1024)) if self.bits == 2 else 4 * number
        part = wire[wire.numel() - size :]
        return unpack_levels(part, number) if self.bits == 2 else part.view(torch.float32)


def check_ratio(code: Code, ratio: object) -> None:
    if not is_whole(ratio, 1):
        raise ValueError(f"{code!r}: ratio must be a whole number, at least 1.")


def _count(length: int, ratio: int) -> int:
    return max(1, length // ratio)


def _align(wire: Tensor) -> Tensor:
    """Pad with zeros to a multiple of 4 bytes."""
    return torch.nn.functional.pad(wire, (0, -wire.numel() % 4))
