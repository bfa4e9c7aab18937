"""How a mean is applied to the live tensors, and the anchor that most updates need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed, split_alike
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce import Code, Reducer
from offbeat.reduce.feedback import check_code, feed


class Update:
    """How a mean is applied: a frozen value. What it remembers is in `state`, as plain tensors and numbers.

    `live` are the live tensors. `room` is memory that holds them packed, and may be overwritten. `anchors`
    says what the update keeps. With "none" it sends weights, and also works for gradients. With "own" each
    worker has its anchor. With "shared" the workers of a round have one, and send displacements from it.
    """

    anchors: ClassVar[Literal["none", "own", "shared"]] = "none"
    sends: ClassVar[Literal["weights", "displacements"]] = "weights"  # a lossy code would round weights
    weighs: ClassVar[bool] = True  # whether its rule holds for a weighted mean
    guards: ClassVar[bool] = True  # whether a worker can be left out of a round
    rated: ClassVar[bool] = False  # whether its rule depends on the learning rates

    def init(self) -> State:
        return {}

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The first period begins: take the anchor."""

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        """Write what this worker sends into `room`."""
        raise NotImplementedError

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        """Write the live tensors in place."""
        raise NotImplementedError

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        """Return this worker's |x − x̄|² and the squared length of the coming change, before `incoming`."""
        raise NotImplementedError

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> list[Tensor] | None:
        """Return what `averaged()` shows in place of the live tensors; None: the live tensors."""
        return None

    def close(self, live: Sequence[Tensor], room: Packed, comm: Communicator, state: State) -> None:
        """The run ends and nothing is in flight: act once more among the workers of a round."""


@dataclass(frozen=True)
class Replace(Update):
    """x ← keep·x + (1 − keep)·mean. A larger `keep` preserves more of the local progress."""

    keep: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise ValueError(f"{self!r}: keep must be at least 0 and below 1.")

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.read(live)

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        blend(live, mean, self.keep)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(live, mean.views)
        return drift, (1 - self.keep) ** 2 * drift


def check_gain(value: object, gain: float) -> None:
    if not 0 < gain <= 1:
        raise ValueError(f"{value!r}: gain must be above 0 and at most 1.")


@dataclass(frozen=True)
class Correct(Update):
    """x ← x + gain·(mean − sent): replaces the sent value by the mean and keeps the steps made since.

    This is the rule for delayed averaging. A single worker stays as it is. While a message is in flight, the
    rule costs one more copy of the model.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        check_gain(self, self.gain)

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        room.read(live)
        state["sent"] = [flat.clone() for flat in room.flats]

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for flat, sent in zip(mean.flats, state.pop("sent"), strict=True):
            flat.sub_(sent).mul_(self.gain)
        for x, change in zip(live, mean.views, strict=True):
            x.add_(change)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(state["sent"], mean.flats)
        return drift, self.gain**2 * drift


class Anchor(NamedTuple):
    """The weights from which workers start a period, and how many share them: 0 if each has its own."""

    packed: Packed
    workers: float = 0

    def write_displacement(self, live: Sequence[Tensor], room: Packed) -> None:
        """Write anchor − x into `room`."""
        for start, x, out in zip(self.packed.views, live, room.views, strict=True):
            torch.sub(start.to(out.device), x, out=out)

    def follow(self, live: Sequence[Tensor], names: Collection[str], workers: float) -> None:
        """Move to the named live tensors, which landed on `workers` workers, if fewer share the anchor."""
        for name, start, x in zip(self.packed.names, self.packed.views, live, strict=True):
            if workers > self.workers and name in names:
                start.copy_(x)


@dataclass(frozen=True)
class Anchored(Update):
    """An update with an anchor, whose vectors are in `state["anchor"]`. It sends displacements."""

    anchors: ClassVar[Literal["none", "own", "shared"]] = "shared"
    sends: ClassVar[Literal["weights", "displacements"]] = "displacements"
    unset: ClassVar[tuple[str, ...]] = ()  # further keys of the state, which start as None
    zeros: ClassVar[tuple[str, ...]] = ()  # names of further vectors in the state, which start at zero

    def init(self) -> State:
        return dict.fromkeys(("anchor", *self.unset, *self.zeros))

    def open(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        room.read(live)
        state["anchor"] = [flat.clone() for flat in room.flats]
        for name in self.zeros:
            state[name] = [torch.zeros_like(flat) for flat in room.flats]

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> list[Tensor] | None:
        return None if state["anchor"] is None else room.over(state["anchor"]).views

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        Anchor(room.over(state["anchor"])).write_displacement(live, room)

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        """The length of the change is unknown: it would cost one more copy of the model."""
        if self.sends == "weights":
            return square_distance(live, mean.views), None
        anchor = mean.over(state["anchor"]).views
        own = (a.to(x.device) - x for a, x in zip(anchor, live, strict=True))
        return square_distance(own, mean.views), None


@dataclass(frozen=True)
class Rebase(Anchored):
    """Moves the anchor to the mean, the sent value toward it, and keeps the steps made since.

        Δ = mean(a − sent)        a ← a − Δ        x ← x + gain·(a − sent)

    This is `Correct` for lossy reducers. It costs two more copies of the model, one of them in flight.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        check_gain(self, self.gain)

    def outgoing(self, live: Sequence[Tensor], room: Packed, clock: Clock, state: State) -> None:
        super().outgoing(live, room, clock, state)
        state["sent"] = [flat.clone() for flat in room.flats]

    def incoming(self, live: Sequence[Tensor], mean: Packed, clock: Clock, state: State) -> None:
        for anchor, change, sent in zip(state["anchor"], mean.flats, state.pop("sent"), strict=True):
            anchor.sub_(change)
            torch.sub(sent, change, out=change).mul_(self.gain)
        for x, change in zip(live, mean.views, strict=True):
            x.add_(change)

    def shown(self, live: Sequence[Tensor], room: Packed, state: State) -> None:
        """The consensus is the mean of the live weights: the anchor is a round behind."""

    def distances(self, live: Sequence[Tensor], mean: Packed, state: State) -> tuple[float, float | None]:
        drift = square_distance(state["sent"], mean.flats)
        return drift, self.gain**2 * drift


@dataclass(frozen=True)
class Detached(Anchored, Reducer):
    """Places each worker at a − lam·e, offset from the anchor by a fraction of its unsent error.

    `offbeat.def_sgd` states the rule. `averaged()` shows, and `finish()` leaves, a − mean(Δ), as if all
    errors had arrived. The update is its own reducer and needs a delay of 0.

        Exchange(params(model), when=Every(1), update=Detached(RandomBlock(64), lam=0.3))
    """

    lossy = remembers = True
    weighs = False
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
        Anchor(room.over(state["anchor"])).write_displacement(live, room)
        for flat, error in zip(room.flats, _errors(room, state), strict=True):
            flat.add_(error, alpha=1 - self.lam)
            error.zero_()
        comm.mean(room.flats).wait()
        for anchor, flat in zip(state["anchor"], room.flats, strict=True):
            torch.sub(anchor, flat, out=flat)
        room.write(live)


def _errors(packed: Packed, state: State) -> list[Tensor]:
    """Return the errors of the live tensors, which are first in each vector. Extras have no errors."""
    return [error[: flat.numel()] for flat, error in zip(packed.flats, state["residual"], strict=False)]


def blend(live: Sequence[Tensor], values: Packed, keep: float) -> None:
    """x ← keep·x + (1 − keep)·value, in the wider of both dtypes."""
    if keep == 0:
        values.write(live)
        return
    for x, value in zip(live, values.views, strict=True):
        x.copy_(keep * x.to(value.dtype) + (1 - keep) * value.to(x.device))


def square_distance(these: Iterable[Tensor], those: Iterable[Tensor]) -> float:
    """Return |these − those|², summed over the tensors in float64, without a copy of all differences."""
    norms = [
        torch.linalg.vector_norm(x - y, dtype=torch.promote_types(y.dtype, torch.float32)).double()
        for a, b in zip(these, those, strict=True)
        for x, y in split_alike(a, b)
    ]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
