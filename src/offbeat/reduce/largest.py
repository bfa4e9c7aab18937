"""Finds the largest values of each row."""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 8
_TILE = 2**20  # values processed at a time
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign


def largest(rows: Tensor, k: int) -> Tensor:
    """The columns of the k entries of largest magnitude in each float32 row, in no order.

    The bits of a float without its sign, read as a whole number, sort like the float. Whole numbers are
    searched faster, since none of them is NaN.
    """
    step = max(1, _TILE // rows.shape[1])
    shape = (min(step, rows.shape[0]), rows.shape[1])
    tile = torch.empty(shape, dtype=torch.int32, device=rows.device)
    parts = torch.split(rows.view(torch.int32), step)
    found = [_largest(torch.bitwise_and(part, _MAGNITUDE, out=tile[: part.shape[0]]), k) for part in parts]
    return torch.cat(found)


def _largest(rows: Tensor, k: int) -> Tensor:
    number, length = rows.shape
    groups = length // _GROUP
    if length % _GROUP or 2 * k > groups:
        return rows.topk(k, dim=1, sorted=False).indices
    # The k largest are in the k groups with the largest maxima: two short searches replace a long one.
    maxima = rows.view(number, _GROUP, groups).amax(1)
    best = maxima.topk(k, dim=1, sorted=False).indices
    first = groups * torch.arange(_GROUP, device=rows.device).view(1, -1, 1)
    columns = (best.unsqueeze(1) + first).flatten(1)
    chosen = rows.gather(1, columns).topk(k, dim=1, sorted=False).indices
    return columns.gather(1, chosen)
