"""Leaves a worker out of one round if it has moved much further than it usually does, or is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from offbeat.base.checks import is_number
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.engine.extras import Payload
from offbeat.engine.optimizers import reset
from offbeat.engine.report import logger
from offbeat.engine.weights import BROKEN, OUTLIER
from offbeat.reduce import Reducer
from offbeat.update.update import Update, square_distance

if TYPE_CHECKING:
    from offbeat.engine.round import Round

_NEW = 0.1  # weight of the newest round in the history
_ROUNDS = 8  # rounds that must be known before one can be an outlier
_LEAST = 0.05  # the smallest deviation, as a share of the mean


# The history before the first round. `infinite` counts buffer values that were never finite, as in a mask.
EMPTY: State = {"mean": 0.0, "variance": 0.0, "rounds": 0, "start": None, "infinite": None}


class Guard:
    """Leaves this worker out of a round if its displacement is an outlier in its own history.

        z = (d − m)/s > limit: out        m, s: running mean and deviation of d, s at least 0.05 m

    d is the norm of the displacement over all live tensors, from the anchor, or from the weights after the
    last round. An outlier enters the history as m + limit·s, so that a lasting change is accepted in time.
    A worker is also left out if its weights, or buffers that rounds average, have become infinite or NaN.
    """

    def __init__(self, limit: float, update: Update, reduce: Reducer, payload: Payload) -> None:
        call, live = f"guard={limit!r}", payload.live
        if not is_number(limit) or not 0 < limit < math.inf:
            raise ValueError(f"{call}: guard is the limit of z, a positive number, such as 3.0.")
        if live.early or not (reduce.agrees and update.weighs and update.guards):
            raise ValueError(
                f"{call} with {live!r} and update={update!r}: a worker can only be left out of a round that "
                "averages parameters, or steps an anchor along displacements: omit guard."
            )
        if payload.buffers.rule == "follow":
            raise ValueError(
                f'{call} with buffers="follow": all workers would take the buffers of rank 0 even if it is '
                'left out: use buffers="average" or "keep".'
            )
        self.limit, self.update, self._payload = limit, update, payload

    def init(self) -> State:
        return dict(EMPTY)

    def note(self, states: Mapping[str, State], round: Round | None = None) -> None:
        """A period begins, possibly with this round in flight. Without an anchor, store the weights."""
        room, state = self._payload.own, states["guard"]
        infinite = self._count_infinite()
        state["infinite"] = infinite if state["infinite"] is None else min(infinite, state["infinite"])
        if self.update.anchors != "none" or (round is not None and round.dropped == BROKEN):
            return
        if state["start"] is None:
            state["start"] = [torch.empty_like(flat) for flat in room.flats]
        room.over(state["start"]).read(self._payload.live.tensors())

    def _count_infinite(self) -> int:
        """Count the values of averaged buffers that are not finite."""
        return sum(int((~torch.isfinite(b)).sum()) for b in self._payload.buffers.averaged().values())

    def _origin(self, room: Packed, states: Mapping[str, State]) -> Packed | None:
        """Return the weights at which the period began; None if another worker's state was loaded since."""
        flats = states["update"].get("anchor") or states["guard"]["start"]
        return None if flats is None else room.over(flats)

    def judge(self, states: Mapping[str, State]) -> int:
        """Return why this worker is left out of the round that begins; 0 if it is not."""
        live, origin = self._payload.live.tensors(), self._origin(self._payload.own, states)
        history = states["guard"]
        starts = live if origin is None else origin.views
        moved = math.sqrt(square_distance((a.to(x.device) for a, x in zip(starts, live, strict=True)), live))
        known = history["infinite"] is not None
        if not math.isfinite(moved) or (known and self._count_infinite() > history["infinite"]):
            return BROKEN
        if origin is None:
            return 0
        mean = history["mean"] if history["rounds"] else moved
        limit = mean + self.limit * max(math.sqrt(history["variance"]), _LEAST * mean)
        out = history["rounds"] >= _ROUNDS and moved > limit
        change = (min(moved, limit) if out else moved) - mean
        history["mean"] = mean + _NEW * change
        history["variance"] = (1 - _NEW) * (history["variance"] + _NEW * change**2)
        history["rounds"] += 1
        return OUTLIER if out else 0

    def land(self, mean: Packed, clock: Clock, states: Mapping[str, State], round: Round) -> None:
        """Give a worker that was left out the result. If all were left out, they return to the start."""
        update, state, live = self.update, states["update"], self._payload.live.tensors()
        if round.nobody and update.sends == "weights" and (origin := self._origin(mean, states)) is not None:
            for flat, start in zip(mean.flats, origin.flats, strict=True):
                flat.copy_(start)
        if update.anchors == "none":
            state.pop("sent", None)
            mean.write(live)
        else:
            update.incoming(live, mean, clock, state)
            mean.over(state["anchor"]).write(live)
        if round.nobody:  # no worker has better buffers, so these count as normal from now on
            states["guard"]["infinite"] = None
        self.note(states)
        round.sent = None  # take the extras as they arrive, since this worker's may not be finite

    def forget(self, round: Round) -> None:
        """Reset the optimizers of a worker whose weights were not finite."""
        if round.dropped == BROKEN:
            for optimizer in self._payload.moments.optimizers:
                reset(optimizer, self._payload.live.parameters)


def name_dropped(clock: Clock, dropped: Mapping[int, int]) -> None:
    """Warn on every rank which workers a round leaves out."""
    reasons = {
        BROKEN: "its weights or buffers are not finite",
        OUTLIER: "it has moved much further than usual",
    }
    for rank, why in dropped.items():
        reason = f"Round {clock.round} (step {clock.step}) goes on without rank {rank}: {reasons[why]}."
        logger.warning(reason)
