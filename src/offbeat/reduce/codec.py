"""The wire forms of a float32 vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE = 2**18  # values processed at a time, so that they stay in the cache between two passes
_TINY = 2.0**-126  # the smallest scale: division by less is not exact enough


class Codec(ABC):
    """A wire form of vectors. Lengths on the wire are multiples of `unit`; vectors may be shorter."""

    unit: int

    @abstractmethod
    def size(self, length: int) -> int:
        """The bytes of `length` values, a multiple of 4."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor, rng: torch.Generator | None = None) -> None:
        """Write the values into the bytes. With `rng`, round at random, without bias."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor, factor: float = 1.0, *, add: bool = False) -> None:
        """Write the values times `factor` into `out`, or add them to it."""


@dataclass(frozen=True)
class CastCodec(Codec):
    """A narrower floating type."""

    dtype: torch.dtype

    unit = 2

    def size(self, length: int) -> int:
        return 2 * length

    def encode(self, values: Tensor, wire: Tensor, rng: torch.Generator | None = None) -> None:
        wire.view(self.dtype)[: values.numel()].copy_(values)

    def decode(self, wire: Tensor, out: Tensor, factor: float = 1.0, *, add: bool = False) -> None:
        narrow = wire.view(self.dtype)
        if not add:
            out.copy_(narrow[: out.numel()])
            if factor != 1:
                out.mul_(factor)
            return
        tile = torch.empty(min(_TILE, out.numel()), device=out.device)
        for start in range(0, out.numel(), _TILE):
            part = out[start : start + _TILE]
            wide = tile[: part.numel()].copy_(narrow[start : start + part.numel()])
            part.add_(wide, alpha=factor)


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Whole numbers of 8 or 4 bits, and one scale per block of `unit` values: all codes, then the scales.

    With 4 bits, the low half of a byte is a value of the first half of a block, the high half one of the
    second.
    """

    bits: int
    unit: int

    def size(self, length: int) -> int:
        return length * self.bits // 8 + 4 * (length // self.unit)

    def encode(self, values: Tensor, wire: Tensor, rng: torch.Generator | None = None) -> None:
        codes, scales = self._parts(wire)
        whole = values.numel() // self.unit
        rows = values[: whole * self.unit].view(whole, self.unit)
        step = max(1, _TILE // self.unit)
        tile = torch.empty(min(step, max(whole, 1)), self.unit, device=values.device)
        for start in range(0, whole, step):
            part = rows[start : start + step]
            end = start + part.shape[0]
            self._encode(part, codes[start:end], scales[start:end], tile[: part.shape[0]], rng)
        if rest := values.numel() - whole * self.unit:
            last = torch.zeros(1, self.unit, device=values.device)
            last[0, :rest] = values[whole * self.unit :]
            self._encode(last, codes[whole : whole + 1], scales[whole : whole + 1], tile[:1], rng)

    def _encode(
        self, values: Tensor, codes: Tensor, scales: Tensor, tile: Tensor, rng: torch.Generator | None
    ) -> None:
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        torch.maximum(high, low.neg_(), out=scales)
        top = int(2 ** (self.bits - 1)) - 1
        scales.div_(top).clamp_(min=_TINY)
        torch.div(values, scales, out=tile)
        if rng is None:
            tile.round_()
        else:
            tile.add_(torch.rand(tile.shape, generator=rng, device=tile.device)).floor_()
            tile.clamp_(max=top)  # the addition may have rounded up
        if self.bits == 8:
            codes.view(torch.int8).copy_(tile)
        else:
            half = self.unit // 2
            codes.copy_(tile[:, :half].add_(tile[:, half:], alpha=16).add_(136))

    def decode(self, wire: Tensor, out: Tensor, factor: float = 1.0, *, add: bool = False) -> None:
        codes, scales = self._parts(wire)
        scales = scales * factor
        whole = out.numel() // self.unit
        rows = out[: whole * self.unit].view(whole, self.unit)
        step = max(1, _TILE // self.unit)
        tile = torch.empty(min(step, max(whole, 1)), self.unit, device=out.device)
        for start in range(0, whole, step):
            part = rows[start : start + step]
            end = start + part.shape[0]
            numbers = self._decode_codes(codes[start:end], tile[: part.shape[0]])
            if add:
                part.addcmul_(numbers, scales[start:end])
            else:
                torch.mul(numbers, scales[start:end], out=part)
        if rest := out.numel() - whole * self.unit:
            numbers = self._decode_codes(codes[whole : whole + 1], tile[:1])
            last = numbers.mul_(scales[whole])[0, :rest]
            if add:
                out[whole * self.unit :].add_(last)
            else:
                out[whole * self.unit :].copy_(last)

    def _decode_codes(self, codes: Tensor, tile: Tensor) -> Tensor:
        if self.bits == 8:
            return tile.copy_(codes.view(torch.int8))
        half = self.unit // 2
        low, high = tile[:, :half], tile[:, half:]
        low.copy_(codes)
        torch.mul(low, 1 / 16, out=high).floor_()
        low.sub_(high, alpha=16)
        return tile.sub_(8)

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and the scales, one row per block."""
        row = self.unit * self.bits // 8
        blocks = wire.numel() // (row + 4)
        return wire[: blocks * row].view(blocks, row), wire[blocks * row :].view(torch.float32).view(-1, 1)
