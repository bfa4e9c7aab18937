"""Updates that step an anchor, which the workers of a round share, or which each has for itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.base import bare
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator
from offbeat.update.update import Anchored, blend, square_distance

Factory = Callable[[list[Tensor]], Optimizer]


def check_outer_step(value: object, lr: float, momentum: float, ramp: int) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"{value!r}: lr must be a positive number.")
    if not 0 <= momentum < 1:
        raise ValueError(f"{value!r}: momentum must be at least 0 and below 1.")
    if not is_whole(ramp, 0):
        raise ValueError(f"{value!r}: ramp must be a whole number of rounds, at least 0.")


def ramp_momentum(momentum: float, ramp: int, round: int) -> float:
    """Return the momentum of a round, counted from 0: see `SGD`."""
    return min(momentum, (round + 1) / (round + 1 + ramp))


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` without its tensors, for outer steps. A larger `momentum` remembers longer.

    With `ramp`, the momentum grows over the rounds r = 1, 2, …:

        min(momentum, r/(r + ramp))

    so that it remembers 1 + r/ramp rounds, a part of the run so far, up to as many as `momentum` does. With a
    larger `ramp` it grows more slowly. In the first rounds the weights move far, in directions that soon
    change, and a full momentum would overshoot: `SGD(0.7, momentum=0.9, ramp=40)`.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    ramp: int = 0

    def __post_init__(self) -> None:
        check_outer_step(self, self.lr, self.momentum, self.ramp)

    def __call__(self, tensors: list[Tensor]) -> Optimizer:
        nesterov = self.nesterov and self.momentum > 0
        return bare.SGD(tensors, lr=self.lr, momentum=self.momentum, nesterov=nesterov)

    def set_momentum(self, optimizer: Optimizer, round: int) -> None:
        """Give the optimizer the momentum of a round, counted from 0."""
        for group in optimizer.param_groups:
            group["momentum"] = ramp_momentum(self.momentum, self.ramp, round)


@dataclass(frozen=True)
class Outer(Anchored):
    """An optimizer steps the anchor, with the workers' mean displacement as its gradient.

        Δ = mean(a − x)        a ← optimizer.step(a, grad=Δ)        x ← keep·x + (1 − keep)·a

    `optimizer` makes a torch.optim optimizer from a list of tensors: `SGD(lr=0.7)`, or a `functools.partial`.
    The anchor may be kept on another `device`, such as "cpu". A larger `keep` preserves more of the local
    progress. With `clip`, a worker whose a − x is longer than that, over all live tensors, sends it shortened
    to this length.
    """

    unset = ("outer",)
    optimizer: Factory
    keep: float = 0.0
    device: str | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        check_factory(self.optimizer)
        if not 0 <= self.keep < 1:
            raise ValueError(f"{self!r}: keep must be at least 0 and below 1.")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"{self!r}: clip must be a positive number, or None.")

    def __repr__(self) -> str:
        clip = "" if self.clip is None else f", clip={self.clip}"
        call = f"(optimizer={self.optimizer!r}, keep={self.keep}, device={self.device!r}{clip})"
        return type(self).__name__ + call

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        room.read(live)
        state["anchor"] = [flat.to(self.device or flat.device, copy=True) for flat in room.flats]

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        super().outgoing(live, room, clock, state)
        if self.clip is not None:
            norms = [torch.linalg.vector_norm(view).double() for view in room.views]
            length = float(torch.linalg.vector_norm(torch.stack(norms)))
            for view in room.views if length > self.clip else ():
                view.mul_(self.clip / length)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        anchor = mean.over(state["anchor"])
        outer_step(self.optimizer, anchor, mean, clock.round, state)
        blend(live, anchor, self.keep)


def check_factory(optimizer: object) -> None:
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Outer({type(optimizer).__name__}(...)): this optimizer is already bound to parameters: pass a "
            "function that makes one, such as SGD(lr=0.7) or functools.partial(torch.optim.Adam, lr=0.01)."
        )
    if not callable(optimizer):
        raise TypeError(f"Outer({optimizer!r}): pass a function that makes one, such as SGD(lr=0.7).")


def outer_step(factory: Factory, anchor: Packed, gradient: Packed, round: int, state: State) -> None:
    """Make one step of the outer optimizer. Its state is kept in plain form, for checkpoints."""
    for tensor, grad in zip(anchor.views, gradient.views, strict=True):
        tensor.grad = grad.to(tensor.device)
    optimizer = factory(anchor.views)
    if state["outer"] is not None:
        optimizer.load_state_dict(state["outer"])
    if isinstance(factory, SGD):
        factory.set_momentum(optimizer, round)
    optimizer.step()
    state["outer"] = optimizer.state_dict()


@dataclass(frozen=True)
class SlowMo(Anchored):
    """Momentum over rounds, in the form that allows a changing rate and a rate of 0.

        v ← β·r·v + (a − mean(x))        a ← a − α v        x ← a

    with r = γ/γ_prev, the ratio of the rates at this round and the one before, at most 10; where γ = 0:
    v ← β v and a ← a − α (a − mean(x)). β is `momentum`, α is `lr`; `ramp` is that of `SGD`.
    """

    rated = True
    unset = ("rates",)
    zeros = ("momentum",)
    lr: float = 1.0
    momentum: float = 0.7
    ramp: int = 0

    def __post_init__(self) -> None:
        check_outer_step(self, self.lr, self.momentum, self.ramp)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        anchor, momentum = mean.over(state["anchor"]), mean.over(state["momentum"])
        views = (anchor.views, momentum.views, mean.views)
        beta = ramp_momentum(self.momentum, self.ramp, clock.round)
        for a, v, d, ratio in zip(*views, ratios(clock, state), strict=True):
            if ratio is None:
                a.sub_(d, alpha=self.lr)
                v.mul_(beta)
            else:
                v.mul_(beta * ratio).add_(d)
                a.sub_(v, alpha=self.lr)
        anchor.write(live)


def ratios(clock: Clock, state: State) -> list[float | None]:
    """Return γ/γ_prev of every tensor: 1 at first, 10 at most, None where γ is 0. γ_prev skips zeros."""
    pairs = list(zip(clock.rates, state["rates"] or clock.rates, strict=True))
    state["rates"] = [now or old for now, old in pairs]
    return [None if now == 0 else 1.0 if old == 0 else min(now / old, 10.0) for now, old in pairs]


@dataclass(frozen=True)
class Gossip(Anchored):
    """An outer step from the worker's own anchor toward the mean of its peers' weights.

        Δ = a − mean(x)        a ← optimizer.step(a, grad=Δ)        x ← a

    Anchors differ between workers, so it sends weights, not displacements.
    """

    anchors, sends = "own", "weights"
    unset = ("outer",)
    optimizer: Factory

    def __post_init__(self) -> None:
        check_factory(self.optimizer)

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.read(live)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        anchor = mean.over(state["anchor"])
        for start, flat in zip(state["anchor"], mean.flats, strict=True):
            torch.sub(start, flat, out=flat)
        outer_step(self.optimizer, anchor, mean, clock.round, state)
        anchor.write(live)


@dataclass(frozen=True)
class Eager(Anchored):
    """An immediate outer step that uses the other workers' displacements of the round before.

    `offbeat.eager_diloco` states the rule and explains `share`. At the end, every worker moves along the
    displacements of the last round that it has not used yet.
    """

    anchors, weighs = "own", False
    unset = ("outer",)
    zeros = ("own", "mean")
    optimizer: Factory
    share: float = 0.75

    def __post_init__(self) -> None:
        check_factory(self.optimizer)
        if not 0 <= self.share <= 1:
            raise ValueError(f"{self!r}: share must be at least 0 and at most 1.")

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        super().outgoing(live, room, clock, state)
        for mean, own, flat in zip(state["mean"], state["own"], room.flats, strict=True):
            mean.add_(flat - own, alpha=max(self.share, 1 / clock.workers))
            own.copy_(flat)
        self._step(live, room, clock.round, state)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for kept, flat in zip(state["mean"], mean.flats, strict=True):
            kept.copy_(flat)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        return square_distance(state["own"], mean.flats), None

    def close(self, live: Sequence[Tensor], room: Packed, comm: Communicator, state: State) -> None:
        """Not through the outer step, whose momentum would add a jump."""
        if state["outer"] is None:
            return
        for mean, own in zip(state["mean"], state["own"], strict=True):
            mean.sub_(own, alpha=max(self.share, 1 / comm.size))
        for x, unused in zip(live, room.over(state["mean"]).views, strict=True):
            x.sub_(unused)
        for flat in (*state["mean"], *state["own"]):
            flat.zero_()  # all displacements are used, so a run that continues starts from zero
        states = state["outer"]["state"].values()
        comm.mean([v for s in states for key, v in s.items() if key != "step" and torch.is_tensor(v)]).wait()

    def _step(self, live: Sequence[Tensor], room: Packed, round: int, state: State) -> None:
        anchor = room.over(state["anchor"])
        outer_step(self.optimizer, anchor, room.over(state["mean"]), round, state)
        anchor.write(live)


@dataclass(frozen=True)
class Overlap(Anchored):
    """A pull toward an anchor z with momentum, on which the workers agree one round late.

        x ← (1 − pull)·x + pull·z        v ← momentum·r·v + (z − x)        send z − v: its mean is the next z

    with r as in `SlowMo`; where the rate is 0: v ← momentum·v, and x is sent. A larger `pull` keeps workers
    closer together.
    """

    anchors, sends, guards, rated = "own", "weights", False, True
    unset = ("rates",)
    zeros = ("momentum",)
    pull: float = 0.2
    momentum: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.pull <= 1:
            raise ValueError(f"{self!r}: pull must be above 0 and at most 1.")
        check_outer_step(self, 1.0, self.momentum, 0)

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The consensus is the mean of the live weights: the anchor is a round behind."""

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        anchor, momentum = room.over(state["anchor"]), room.over(state["momentum"])
        views = (anchor.views, momentum.views, room.views)
        for x, z, v, out, ratio in zip(live, *views, ratios(clock, state), strict=True):
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
