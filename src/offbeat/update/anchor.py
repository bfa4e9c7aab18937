"""The anchor: the weights that workers set out from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from offbeat.base.packed import Packed


class Anchor:
    """The weights that workers set out from, packed like the live tensors.

    `workers` is the number of workers that share it. Its vectors are what an update stores in its state.
    """

    def __init__(self, packed: Packed, workers: int = 1) -> None:
        self.packed, self.workers = packed, workers

    @classmethod
    def take(cls, live: Sequence[Tensor], room: Packed, device: str | None = None) -> Anchor:
        """Copy the live tensors."""
        room.read(live)
        return cls(room.over([flat.to(device or flat.device, copy=True) for flat in room.flats]))

    @property
    def flats(self) -> list[Tensor]:
        return self.packed.flats

    @property
    def views(self) -> list[Tensor]:
        return self.packed.views

    def displacement(self, live: Sequence[Tensor], room: Packed) -> None:
        """Write anchor − x into `room`."""
        for start, x, out in zip(self.views, live, room.views, strict=True):
            torch.sub(start.to(out.device), x, out=out)

    def follow(self, live: Sequence[Tensor], names: Collection[str]) -> None:
        """Set the tensors of these names to the live ones."""
        for name, start, x in zip(self.packed.names, self.views, live, strict=True):
            if name in names:
                start.copy_(x)
