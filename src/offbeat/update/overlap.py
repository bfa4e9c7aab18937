"""Updates for `delay="round"`: each round uses the mean sent in the round before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator
from offbeat.update.anchor import Anchor
from offbeat.update.outer import (
    Anchored,
    Factory,
    check_factory,
    check_slow,
    outer_step,
    ratios,
)
from offbeat.update.update import square_distance


@dataclass(frozen=True)
class Eager(Anchored):
    """An immediate outer step that uses the other workers' displacements of the round before.

        Δ_k(r) = a_k − x_k        D_k = Δ̄(r−1) + (Δ_k(r) − Δ_k(r−1))/K
        a_k ← optimizer.step(a_k, grad=D_k)        x_k ← a_k

    At the end every worker steps along what it still lacks, so that each has used the sum of all Δ̄.
    """

    optimizer: Factory

    def __post_init__(self) -> None:
        check_factory(self.optimizer)

    def init(self) -> State:
        return {"anchor": None, "outer": None, "own": None, "mean": None}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        super().open(live, room, state)
        for name in ("own", "mean"):
            state[name] = [torch.zeros_like(flat) for flat in room.flats]

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        super().outgoing(live, room, clock, state)
        for mean, own, flat in zip(state["mean"], state["own"], room.flats, strict=True):
            mean.add_(flat - own, alpha=1 / clock.workers)
            own.copy_(flat)
        self._step(live, room, state)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for kept, flat in zip(state["mean"], mean.flats, strict=True):
            kept.copy_(flat)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        return square_distance(state["own"], mean.flats), None

    def close(self, live: Sequence[Tensor], room: Packed, comm: Communicator, state: State) -> None:
        if state["anchor"] is None:
            return
        Anchor(room.over(state["anchor"])).displacement(live, room)
        comm.mean(room.flats).wait()
        for mean, own, flat in zip(state["mean"], state["own"], room.flats, strict=True):
            mean.add_(flat).sub_(own, alpha=1 / comm.size)
        self._step(live, room, state)
        for flat in (*state["mean"], *state["own"]):
            flat.zero_()  # nothing is left over, so a run that continues starts from zero
        states = state["outer"]["state"].values()
        comm.mean([v for s in states for key, v in s.items() if key != "step" and torch.is_tensor(v)]).wait()

    def _step(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        anchor = room.over(state["anchor"])
        outer_step(self.optimizer, anchor, room.over(state["mean"]), state)
        anchor.write(live)


@dataclass(frozen=True)
class Overlap(Anchored):
    """A pull toward an anchor z with momentum, on which the workers agree one round late.

        x ← (1 − pull)·x + pull·z        v ← momentum·r·v + (z − x)        send z − v: its mean is the next z

    with r as in `SlowMo`; where the rate is 0: v ← momentum·v, and x is sent. A larger `pull` keeps the
    workers closer together.
    """

    anchors = "own"

    pull: float = 0.6
    momentum: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.pull <= 1:
            raise ValueError(f"{self!r}: pull must be above 0 and at most 1.")
        check_slow(self, 1.0, self.momentum)

    def init(self) -> State:
        return {"anchor": None, "momentum": None, "rates": None}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        super().open(live, room, state)
        state["momentum"] = [torch.zeros_like(flat) for flat in room.flats]

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The consensus is the mean of the live weights: the anchor is a round behind."""

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        anchor, momentum = room.over(state["anchor"]), room.over(state["momentum"])
        rows = zip(live, anchor.views, momentum.views, room.views, ratios(clock, state), strict=True)
        for x, z, v, out, ratio in rows:
            x.copy_((1 - self.pull) * x.to(z.dtype) + self.pull * z)
            if ratio is None:
                v.mul_(self.momentum)
                out.copy_(x)
            else:
                v.mul_(self.momentum * ratio).add_(z - x)
                torch.sub(z, v, out=out)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for anchor, flat in zip(state["anchor"], mean.flats, strict=True):
            anchor.copy_(flat)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        return square_distance(live, mean.views), None
