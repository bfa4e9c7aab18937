"""The gradients on their way to the server: a bounded number of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.packed import Packed
from offbeat.base.tensors import Live, local
from offbeat.comm.communicator import Pending


class Slot:
    """Memory for one push."""

    def __init__(self, live: Live, room: Packed) -> None:
        self._live, self.room = live, room
        self._taken: set[int] = set()
        self.applied: Pending[None] | None = None  # the push that lies here, until the server has it

    def take(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer's parameters, as they are now."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        views, gradients = [], []
        for name, p, view in zip(self._live.names, self._live.parameters, self.room.views, strict=True):
            if id(p) in held and p.grad is not None:
                if p.grad.layout != torch.strided:
                    raise TypeError(f"The gradient of {name!r} is sparse: build its layer with sparse=False.")
                views.append(view)
                gradients.append(local(p.grad))
                self._taken.add(id(view))
        if views:
            torch._foreach_copy_(views, gradients)

    def close(self) -> list[Tensor]:
        """The gradient of the step that is over: zero where none was taken."""
        for view in self.room.views:
            if id(view) not in self._taken:
                view.zero_()
        self._taken.clear()
        return self.room.flats


class PushSlots:
    """Slots that are used in turn. One is free again when the server has applied what lay in it."""

    def __init__(self, live: Live, room: Packed, length: int) -> None:
        rooms = [room.over([torch.zeros_like(flat) for flat in room.flats]) for _ in range(length)]
        self._slots = [Slot(live, room) for room in rooms]

    def free(self, step: int) -> Slot:
        """The slot of a step, once it is free: a slow network holds a fast worker here."""
        slot = self._slots[step % len(self._slots)]
        if slot.applied is not None:
            slot.applied.wait()
            slot.applied = None
        return slot

    def drain(self) -> None:
        """Until the server has applied all."""
        for step in range(len(self._slots)):
            self.free(step)
