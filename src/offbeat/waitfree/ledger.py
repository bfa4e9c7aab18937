"""What each worker has, kept by its sidecar while it computes: rounds move it, steps are added to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.comm.background import Sidecar
from offbeat.waitfree.attendance import Kind
from offbeat.waitfree.rounds import Outcome, sync_device


class Accounts:
    """An account, and the steps not yet in it. A round takes both, and leaves the group's mean as account.

    So no round changes the sum over all workers, and every step is in it once, however late it came. Accounts
    lie in one of two rooms, so that a round can begin while the result of the one before is read.
    """

    def __init__(self, tensors: Mapping[str, Tensor], version: int, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.device = next(iter(tensors.values())).device
        self._rooms = [Packed.like(tensors) for _ in range(2)]
        self._place, self._version = 0, version  # the room of the account
        self._steps, self._open = Packed.like(tensors), False  # not yet in the account; whether there are any
        self._mine, self._made = Packed.like(tensors), False  # where a step begins; once it is made, the step
        self._read: int | None = None  # the room that is being read
        self.meet(list(tensors.values()))

    def meet(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, while its sidecar has no round to run: everybody has these, all steps in them."""
        self._open = False
        for packed in (self._rooms[self._place], self._mine):
            packed.read(tensors)
            sync_device(packed)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker: the step it has made."""
        for began, now in zip(self._mine.views, tensors, strict=True):
            torch.sub(now.to(began.dtype), began, out=began)
        sync_device(self._mine)
        self._made = True

    def publish(self, version: int) -> None:
        """What is shared being locked: the step that was made, if any, is for the next round."""
        self._version = version
        if self._made and self._open:
            torch._foreach_add_(self._steps.flats, self._mine.flats)
            sync_device(self._steps)
        elif self._made:
            self._steps, self._mine, self._open = self._mine, self._steps, True
        self._made = False

    def take(self, round: int) -> tuple[Packed, int]:
        account, room = self._rooms[self._place], self._rooms[1 - self._place]
        with self._sidecar.locked():
            self._sidecar.until(lambda: self._read != 1 - self._place, "a result to be read")
        torch._foreach_copy_(room.flats, account.flats)
        with self._sidecar.locked():
            if self._open:
                torch._foreach_add_(room.flats, self._steps.flats)
                sync_device(room)
            self._open = False
            return room, self._version

    def bring(self, mean: Packed) -> None:
        sync_device(mean)
        self._place = 1 - self._place
        self._rooms[self._place] = mean

    def fetch(self, outcome: Outcome) -> None:
        self._read = self._place
        if self._open:
            torch._foreach_copy_(self._mine.flats, self._steps.flats)
        else:
            for flat in self._mine.flats:
                flat.zero_()

    def merge(self, tensors: Sequence[Tensor], outcome: Outcome, kind: Kind) -> None:
        """In the worker: the account, and the steps that are not in it yet."""
        assert self._read is not None
        torch._foreach_add_(self._mine.flats, self._rooms[self._read].flats)
        self._mine.write(tensors)
        sync_device(self._mine)  # lest the next round begins while it is read
        with self._sidecar.locked():
            self._read = None
