"""Updates with an anchor of each worker's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator
from offbeat.update.outer import Anchor, Anchored, Factory, check_factory, check_step, outer_step, ratios
from offbeat.update.update import square_distance


@dataclass(frozen=True)
class Gossip(Anchored):
    """An outer step from the worker's own anchor toward the mean of its peers' weights.

        Δ = a − mean(x)        a ← optimizer.step(a, grad=Δ)        x ← a

    Anchors differ between workers, so it sends weights, not displacements.
    """

    anchors = "own"

    optimizer: Factory

    def __post_init__(self) -> None:
        check_factory(self.optimizer)

    def init(self) -> State:
        return {"anchor": None, "outer": None}

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.read(live)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        anchor = mean.over(state["anchor"])
        for start, flat in zip(state["anchor"], mean.flats, strict=True):
            torch.sub(start, flat, out=flat)
        outer_step(self.optimizer, anchor, mean, state)
        anchor.write(live)


@dataclass(frozen=True)
class Eager(Anchored):
    """An immediate outer step that uses the other workers' displacements of the round before.

    `offbeat.eager_diloco` states the rule. At the end every worker steps along what it still lacks, so that
    each has used the sum of all mean displacements.
    """

    anchors = "own"
    sends = "displacements"
    zeros = ("own", "mean")

    optimizer: Factory

    def __post_init__(self) -> None:
        check_factory(self.optimizer)

    def init(self) -> State:
        return {"anchor": None, "outer": None, "own": None, "mean": None}

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

    with r as in `SlowMo`; where the rate is 0: v ← momentum·v, and x is sent.
    """

    anchors = "own"
    zeros = ("momentum",)

    pull: float = 0.6
    momentum: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.pull <= 1:
            raise ValueError(f"{self!r}: pull must be above 0 and at most 1.")
        check_step(self, 1.0, self.momentum)

    def init(self) -> State:
        return {"anchor": None, "momentum": None, "rates": None}

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
