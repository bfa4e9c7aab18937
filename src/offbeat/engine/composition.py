"""Which answers of an exchange go together: what cannot work is refused when the exchange is built."""

from __future__ import annotations

from offbeat.among import Peers
from offbeat.base.tensors import Live
from offbeat.engine.round import Delay
from offbeat.reduce import Mean, Reducer
from offbeat.update.update import Replace, Update
from offbeat.when import Schedule


def check_update(update: Update | None, delay: Delay, live: Live, peers: Peers) -> Update:
    if update is not None and not isinstance(update, Update):
        raise TypeError(f"update={update!r}: pass an update, such as Replace() or Outer(SGD(lr=0.7)).")
    update = Replace() if update is None else update
    if update.anchors == "shared" and not peers.fixed:
        raise ValueError(
            f"update={update!r} with among={peers!r}: the workers of a round must have the same anchor, but "
            "the groups change; use Gossip(SGD(lr=0.7)), whose anchors may differ, or Subgroups(...)."
        )
    if live.early and update.anchors != "none":
        raise ValueError(
            f"update={update!r} with {live!r}: it needs an anchor, which gradients do not have; use "
            "Replace() or Correct(), or params(model)."
        )
    if delay and isinstance(update, Reducer):
        raise ValueError(f"delay={delay!r} with update={update!r}: the steps made meanwhile would be lost.")
    return update


def check_reducer(reduce: Reducer | None, update: Update, live: Live) -> Reducer:
    """What is sent; an update that owns its code is its own reducer."""
    if reduce is not None and not isinstance(reduce, Reducer):
        raise TypeError(f"reduce={reduce!r}: pass a reducer, such as Mean().")
    if isinstance(update, Reducer):
        if reduce is not None:
            raise ValueError(
                f"reduce={reduce!r} with update={update!r}, which has its own: leave reduce out."
            )
        return update
    chosen = Mean() if reduce is None else reduce
    if live.early:
        return chosen
    if not chosen.agrees:
        raise ValueError(f"reduce={chosen!r}: every worker gets its own result, so it is for grads(model).")
    if chosen.lossy and update.sends == "weights":
        raise ValueError(
            f"reduce={chosen!r} with update={update!r}: the weights themselves would be rounded; send the "
            "difference from an anchor, with update=Outer(SGD(lr=1)), which also averages."
        )
    return chosen


def check_drift(drift: bool | None, when: Schedule, reduce: Reducer, live: Live) -> bool:
    """Whether rounds report drift or loss. Drift cannot be measured with a lossy reducer."""
    if reduce.lossy and (drift or "drift" in when.needs):
        wish = "drift=True" if drift else repr(when)
        raise ValueError(
            f"{wish} with reduce={reduce!r}: drift cannot be measured with a lossy reducer: use Mean()."
        )
    if when.needs and drift is False:
        raise ValueError(f"drift=False with {when!r}, which needs what rounds measure: leave drift out.")
    return bool(when.needs) or not (live.early or reduce.lossy) if drift is None else drift
