"""The places of the largest values of each row."""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 8
_TILE = 2**18  # values that are worked on at a time


def largest(rows: Tensor, k: int) -> Tensor:
    """The columns of the k entries of largest magnitude of each row, in no order."""
    step = max(1, _TILE // rows.shape[1])
    tile = torch.empty(min(step, rows.shape[0]), rows.shape[1], device=rows.device)
    parts = torch.split(rows, step)
    return torch.cat([_largest(torch.abs(part, out=tile[: part.shape[0]]), k) for part in parts])


def _largest(rows: Tensor, k: int) -> Tensor:
    number, length = rows.shape
    groups = length // _GROUP
    if length % _GROUP or 2 * k > groups:
        return rows.topk(k, dim=1, sorted=False).indices
    # The k largest lie in the k groups with the largest maxima: two short searches instead of a long one.
    maxima = rows.view(number, _GROUP, groups).amax(1)
    best = maxima.topk(k, dim=1, sorted=False).indices
    columns = (best.unsqueeze(1) + groups * torch.arange(_GROUP, device=rows.device).view(1, -1, 1)).flatten(
        1
    )
    chosen = rows.gather(1, columns).topk(k, dim=1, sorted=False).indices
    return columns.gather(1, chosen)
