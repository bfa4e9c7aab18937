"""Packs small whole numbers, and values rounded to a few levels, into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 1024  # values that share one table of levels


def pack12(numbers: Tensor) -> Tensor:
    """Numbers below 4096, two in three bytes; an odd last one takes two."""
    even = torch.nn.functional.pad(numbers, (0, numbers.numel() % 2)).view(-1, 2)
    a, b = even[:, 0], even[:, 1]
    return torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], 1).to(torch.uint8).flatten()


def unpack12(wire: Tensor, length: int) -> Tensor:
    x, y, z = wire.view(-1, 3).int().unbind(1)
    return torch.stack([x | ((y & 15) << 8), (y >> 4) | (z << 4)], 1).flatten()[:length].long()


def pack16(numbers: Tensor) -> Tensor:
    """Numbers below 65536, two bytes each."""
    return numbers.to(torch.int16).view(torch.uint8)


def unpack16(wire: Tensor) -> Tensor:
    return wire.view(torch.int16).long() & 65535


def pack_levels(values: Tensor) -> Tensor:
    """Two bits per value: four equal bins over ±3σ of each group of values, and the mean of each bin.

    A group with zeros has one level for zero, so that they stay zero, and one for all values below it; its σ
    is that of the other values.
    """
    groups = -(-values.numel() // GROUP)
    rows = torch.nn.functional.pad(values, (0, groups * GROUP - values.numel())).view(groups, GROUP)
    real = (torch.arange(groups * GROUP, device=values.device) < values.numel()).float().view(groups, GROUP)
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
    four = bins.view(-1, 4)
    codes = four[:, 0] | (four[:, 1] << 2) | (four[:, 2] << 4) | (four[:, 3] << 6)
    return torch.cat([levels.flatten().view(torch.uint8), codes])


def unpack_levels(wire: Tensor, length: int) -> Tensor:
    groups = -(-length // GROUP)
    levels, codes = wire[: 16 * groups].view(torch.float32).view(groups, 4), wire[16 * groups :]
    shifts = torch.arange(0, 8, 2, device=wire.device, dtype=torch.uint8)
    bins = ((codes.unsqueeze(1) >> shifts) & 3).view(groups, GROUP).long()
    return levels.gather(1, bins).flatten()[:length]
