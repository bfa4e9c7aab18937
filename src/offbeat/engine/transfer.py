"""What another worker may continue from: a saved state without what belongs to one worker alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from offbeat.base.clock import State
from offbeat.engine.agreement import OWN
from offbeat.engine.exchange import Exchange
from offbeat.engine.extras import Payload
from offbeat.engine.guard import EMPTY
from offbeat.engine.part import Part
from offbeat.engine.weights import NO_WEIGHT

_DROPPED = {
    "residual": "what codes have not sent yet",
    "samples": "samples since the last round",
    "losses": "losses since the last round",
    "moments": "moments in the air",
}


class Shared(NamedTuple):
    """The state of a part that any worker may continue from, and what it lacks of the state it came from."""

    state: State
    dropped: frozenset[str]


def why_unshared(parts: Sequence[Part]) -> str | None:
    """Return why only the worker that saved the state of these parts can continue from it, if it is so."""
    return next((part.unshared for part in parts if part.unshared is not None), None)


def share(part: Part, state: State) -> Shared:
    """Return what any worker may continue from, given the state that one worker has saved.

    Kept is what all workers have in common: anchor, outer optimizer, rhythm, memory of the schedule, and the
    mean of a round in the air, which lands at its step. What a worker sent to that round is replaced by the
    mean: a worker that has the consensus would have sent it. Dropped is what belongs to one worker.

    After loading it, the live weights must become the consensus: what `part.shown()` returns, and where it
    returns nothing the mean over all workers. Tensors are shared with `state`, which is not changed.
    """
    assert part.unshared is None, part.unshared
    if not isinstance(part, Exchange):
        return Shared(state, frozenset())
    inside = state.get(OWN, state)
    states, air = _without_residuals(inside["states"]), inside["air"]
    if "guard" in states:
        states["guard"] = dict(EMPTY)  # a history of displacements is that of one worker
    if air is not None:
        if "sent" in states["update"]:
            pairs = zip(air["mean"], states["update"]["sent"], strict=False)  # extras lie behind
            states["update"]["sent"] = [mean[: sent.numel()].clone() for mean, sent in pairs]
        air = {**air, "moments": None, "sent": _extras(part.payload, air), "bytes": [0, 0]}
        air["seconds"] = [0.0, 0.0]
    inside = {**inside, "states": states, "air": air}
    tally = {**state["tally"], "samples": NO_WEIGHT}
    place = {"tally": tally, "ledger": {**state["ledger"], "loss": 0.0, "losses": 0}}
    shared = {**state, OWN: inside, **place} if OWN in state else {**inside, **place}
    return Shared(shared, frozenset(_find_dropped(state, shared)))


def _without_residuals(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: None if k == "residual" else _without_residuals(item) for k, item in value.items()}
    return [_without_residuals(item) for item in value] if isinstance(value, list) else value


def _extras(payload: Payload, air: State) -> list[Tensor] | None:
    """Buffers in the air as they arrive: then landing shifts the consensus by nothing."""
    if air["sent"] is None:
        return None
    buffers = payload.packed.over(air["mean"]).cut(*payload.lengths)[2].views
    return [buffer.clone() for buffer in (*buffers, *(air["followed"] or ()))]


def _find_dropped(before: Any, after: Any) -> Iterator[str]:
    """Yield in words what one state has and the other lacks."""
    if isinstance(before, dict):
        for key, value in before.items():
            if key in _DROPPED and value not in (None, 0, NO_WEIGHT) and value is not after[key]:
                yield _DROPPED[key]
            else:
                yield from _find_dropped(value, after[key])
    elif isinstance(before, list) and isinstance(after, list):
        for one, other in zip(before, after, strict=False):
            yield from _find_dropped(one, other)
