"""Error feedback that places each worker beside the anchor: the update of DEF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce import Code, Reducer
from offbeat.reduce.feedback import check_code, feed
from offbeat.update.anchor import Anchor
from offbeat.update.outer import Anchored


@dataclass(frozen=True)
class Detached(Anchored, Reducer):
    """Places each worker at a − lam·e, offset from the anchor by a fraction of its unsent error.

        Δ_k = (a − x) + (1 − lam)·e_k        a ← a − mean(code(Δ_k))
        e_k ← Δ_k − code(Δ_k)                x ← a − lam·e_k

    Each worker takes its gradients where it would be if a part of its error had arrived. lam=0 is error
    feedback. `averaged()` shows, and `finish()` leaves, a − mean(Δ_k), as if all errors had arrived. The
    update is its own reducer and needs a delay of 0.

        Exchange(params(model), when=Every(1), update=Detached(RandomBlock(64), lam=0.3))
    """

    code: Code
    lam: float = 0.3

    def __post_init__(self) -> None:
        check_code(self.code, "Detached")
        if not 0 <= self.lam <= 1:
            raise ValueError(f"{self!r}: lam must be at least 0 and at most 1.")

    lossy = remembers = True

    def init(self) -> State:
        return {"anchor": None, "residual": None, "code": self.code.init()}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        """Add (1 − lam)·e to the payload and send it."""
        return feed(self.code, 1 - self.lam, payload, comm, clock, state)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for anchor, change, error in zip(state["anchor"], mean.flats, _errors(mean, state), strict=True):
            anchor.sub_(change)
            torch.sub(anchor, error, alpha=self.lam, out=change)
        mean.write(live)

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> list[Tensor] | None:
        if state["residual"] is None:
            return None
        errors = room.over(_errors(room, state)).views
        return [x - (1 - self.lam) * error for x, error in zip(live, errors, strict=True)]

    def close(self, live: Sequence[Tensor], room: Packed, comm: Communicator, state: State) -> None:
        if state["residual"] is None:
            return
        Anchor(room.over(state["anchor"])).displacement(live, room)
        for flat, error in zip(room.flats, _errors(room, state), strict=True):
            flat.add_(error, alpha=1 - self.lam)
            error.zero_()
        comm.mean(room.flats).wait()
        for anchor, flat in zip(state["anchor"], room.flats, strict=True):
            torch.sub(anchor, flat, out=flat)
        room.write(live)


def _errors(packed: Packed, state: State) -> list[Tensor]:
    """Return the errors of the live tensors, which come first in each vector; extras have no errors."""
    return [error[: flat.numel()] for flat, error in zip(packed.flats, state["residual"], strict=False)]
