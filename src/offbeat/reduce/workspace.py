"""Buffers that codes keep with a payload from round to round. They are not part of a checkpoint."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offbeat.base.packed import Packed

_kept: WeakKeyDictionary[Packed, dict[Hashable, Tensor]] = WeakKeyDictionary()


def kept_with(payload: Packed) -> list[Tensor]:
    """The buffers that codes keep with a payload."""
    return list(_kept.get(payload, {}).values())


class Workspace:
    """Buffers by name and shape. They start as zeros and keep their contents."""

    def __init__(self, payload: Packed, part: int) -> None:
        self._rooms = _kept.setdefault(payload, {})
        self._part = part

    def room(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        key = (self._part, name, shape, dtype, like.device)
        if key not in self._rooms:
            self._rooms[key] = torch.zeros(shape, dtype=dtype, device=like.device)
        return self._rooms[key]
