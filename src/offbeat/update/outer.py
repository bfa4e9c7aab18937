"""Updates with an anchor that the workers of a round share, and what all updates with an anchor need."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce import Code, Reducer
from offbeat.reduce.code import check_code, feed
from offbeat.update.update import Update, blend, square_distance

Factory = Callable[[list[Tensor]], Optimizer]


class Anchor:
    """The weights that workers set out from, packed like the live tensors.

    An update stores its vectors, `packed.flats`, in its state.
    """

    def __init__(self, packed: Packed) -> None:
        self.packed, self.views = packed, packed.views

    def displacement(self, live: Sequence[Tensor], room: Packed) -> None:
        """Write anchor − x into `room`."""
        for start, x, out in zip(self.views, live, room.views, strict=True):
            torch.sub(start.to(out.device), x, out=out)

    def follow(self, live: Sequence[Tensor], names: Collection[str]) -> None:
        """Set the tensors of these names to the live ones."""
        for name, start, x in zip(self.packed.names, self.views, live, strict=True):
            if name in names:
                start.copy_(x)


def check_step(value: object, lr: float, momentum: float) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"{value!r}: lr must be a positive number.")
    if not 0 <= momentum < 1:
        raise ValueError(f"{value!r}: momentum must be at least 0 and below 1.")


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` without its tensors, for outer steps. A larger `momentum` remembers longer."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_step(self, self.lr, self.momentum)

    def __call__(self, tensors: list[Tensor]) -> Optimizer:
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(tensors, lr=self.lr, momentum=self.momentum, nesterov=nesterov)


@dataclass(frozen=True)
class Anchored(Update):
    """Base of updates with an anchor, whose vectors are in `state["anchor"]`. It sends displacements."""

    anchors: ClassVar[Literal["none", "own", "shared"]] = "shared"
    zeros: ClassVar[tuple[str, ...]] = ()  # names of further vectors in the state, which start at zero

    def init(self) -> State:
        return {"anchor": None}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        room.read(live)
        state["anchor"] = [flat.clone() for flat in room.flats]
        for name in self.zeros:
            state[name] = [torch.zeros_like(flat) for flat in room.flats]

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> list[Tensor] | None:
        return None if state["anchor"] is None else room.over(state["anchor"]).views

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        Anchor(room.over(state["anchor"])).displacement(live, room)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        """The length of the change is unknown: it would cost one more copy of the model."""
        if self.sends == "weights":
            return square_distance(live, mean.views), None
        anchor = mean.over(state["anchor"]).views
        own = (a.to(x.device) - x for a, x in zip(anchor, live, strict=True))
        return square_distance(own, mean.views), None


@dataclass(frozen=True)
class Outer(Anchored):
    """An optimizer steps the anchor, with the workers' mean displacement as its gradient.

        Δ = mean(a − x)        a ← optimizer.step(a, grad=Δ)        x ← keep·x + (1 − keep)·a

    `optimizer` makes a torch.optim optimizer from a list of tensors: `SGD(lr=0.7)`, or a `functools.partial`.
    The anchor may be kept on another `device`, such as "cpu". A larger `keep` preserves more of the local
    progress.
    """

    optimizer: Factory
    keep: float = 0.0
    device: str | None = None

    def __post_init__(self) -> None:
        check_factory(self.optimizer)
        if not 0 <= self.keep < 1:
            raise ValueError(f"{self!r}: keep must be at least 0 and below 1.")

    def init(self) -> State:
        return {"anchor": None, "outer": None}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        room.read(live)
        state["anchor"] = [flat.to(self.device or flat.device, copy=True) for flat in room.flats]

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        anchor = mean.over(state["anchor"])
        outer_step(self.optimizer, anchor, mean, state)
        blend(live, anchor, self.keep)


def check_factory(optimizer: object) -> None:
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Outer({type(optimizer).__name__}(...)): this optimizer is already bound to parameters: pass a "
            "function that makes one, such as SGD(lr=0.7) or functools.partial(torch.optim.Adam, lr=0.01)."
        )
    if not callable(optimizer):
        raise TypeError(f"Outer({optimizer!r}): pass a function that makes one, such as SGD(lr=0.7).")


def outer_step(factory: Factory, anchor: Packed, gradient: Packed, state: State) -> None:
    """Make one step of the outer optimizer. Its state is stored in plain form, as checkpoints need it."""
    for tensor, grad in zip(anchor.views, gradient.views, strict=True):
        tensor.grad = grad.to(tensor.device)
    optimizer = factory(anchor.views)
    if state["outer"] is not None:
        optimizer.load_state_dict(state["outer"])
    optimizer.step()
    state["outer"] = optimizer.state_dict()


@dataclass(frozen=True)
class Rebase(Anchored):
    """Moves the anchor to the mean, replaces the sent value by it, and keeps the steps made since.

        Δ = mean(a − sent)        a ← a − Δ        x ← x + (a − sent)

    This is `Correct` for lossy reducers. It costs two more copies of the model, one of them in the air.
    """

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        super().outgoing(live, room, clock, state)
        state["sent"] = [flat.clone() for flat in room.flats]

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for anchor, change, sent in zip(state["anchor"], mean.flats, state.pop("sent"), strict=True):
            anchor.sub_(change)
            torch.sub(sent, change, out=change)
        for x, change in zip(live, mean.views, strict=True):
            x.add_(change)

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The consensus is the mean of the live weights: the anchor is a round behind."""

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(state["sent"], mean.flats)
        return drift, drift


@dataclass(frozen=True)
class SlowMo(Anchored):
    """Momentum over rounds, in the form that allows a changing rate and a rate of 0.

        v ← β·r·v + (a − mean(x))        a ← a − α v        x ← a

    with r = γ/γ_prev, the ratio of the rates at this round and the one before, at most 10; where γ = 0:
    v ← β v and a ← a − α (a − mean(x)). β is `momentum`, α is `lr`.
    """

    zeros = ("momentum",)

    lr: float = 1.0
    momentum: float = 0.7

    def __post_init__(self) -> None:
        check_step(self, self.lr, self.momentum)

    def init(self) -> State:
        return {"anchor": None, "momentum": None, "rates": None}

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        anchor, momentum = mean.over(state["anchor"]), mean.over(state["momentum"])
        rows = zip(anchor.views, momentum.views, mean.views, ratios(clock, state), strict=True)
        for a, v, d, ratio in rows:
            if ratio is None:
                a.sub_(d, alpha=self.lr)
                v.mul_(self.momentum)
            else:
                v.mul_(self.momentum * ratio).add_(d)
                a.sub_(v, alpha=self.lr)
        anchor.write(live)


def ratios(clock: Clock, state: State) -> list[float | None]:
    """Return γ/γ_prev of every tensor: 1 in the first round, 10 at most, None where γ is 0.

    A rate of 0 does not become the next γ_prev.
    """
    before = state["rates"] or list(clock.rates)
    state["rates"] = [now or old for now, old in zip(clock.rates, before, strict=True)]
    return [
        None if now == 0 else 1.0 if old == 0 else min(now / old, 10.0)
        for now, old in zip(clock.rates, before, strict=True)
    ]


@dataclass(frozen=True)
class Detached(Anchored, Reducer):
    """Places each worker at a − lam·e, offset from the anchor by a fraction of its unsent error.

    `offbeat.def_sgd` states the rule. `averaged()` shows, and `finish()` leaves, a − mean(Δ), as if all
    errors had arrived. The update is its own reducer and needs a delay of 0.

        Exchange(params(model), when=Every(1), update=Detached(RandomBlock(64), lam=0.3))
    """

    lossy = remembers = True

    code: Code
    lam: float = 0.3

    def __post_init__(self) -> None:
        check_code(self.code, "Detached")
        if not 0 <= self.lam <= 1:
            raise ValueError(f"{self!r}: lam must be at least 0 and at most 1.")

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
