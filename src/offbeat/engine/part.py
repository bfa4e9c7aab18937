"""The parts that a method is made of, and checks that refuse combinations that cannot work."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.among import Peers, Subgroups, World
from offbeat.base.checks import is_number
from offbeat.base.clock import Clock, State
from offbeat.base.tensors import Live, OptimizerState
from offbeat.comm.communicator import Communicator, Metered
from offbeat.comm.presence import Departure
from offbeat.engine.report import Emit, Ledger, Totals
from offbeat.engine.round import Delay
from offbeat.reduce import Mean, Reducer
from offbeat.update.update import Rebase, Replace, Update
from offbeat.when import Never, Schedule, Then

if TYPE_CHECKING:
    from offbeat.engine.sender import Sender


EVERYONE = sys.maxsize  # the number of workers of a landing on all, above that of any group


class Landing(NamedTuple):
    """The named parameters have new values, the same on this number of workers."""

    names: Collection[str]
    workers: float


class Part:
    """Anything that acts around the local step. Parts are called in the order of their list."""

    model: nn.Module
    peers: Peers
    follows: Part | None = None  # the part that must come directly before it in the list
    outside: Metered | None = None  # carries messages that no report covers; their bytes go into the totals
    when: Schedule | None = None  # plans its rounds
    ledger: Ledger | None = None  # holds its reports, and measures time for its schedule
    weighs: bool = False  # whether its rounds weigh workers by their samples, or it has no rounds
    sender: Sender | None = None  # what its payloads leave through
    load: int = 1  # gradients of a batch that a worker computes in each step
    saved_every: int = 1  # its state can be saved after steps that are multiples of this
    totals: Totals = Totals()  # the cost of the run on this worker; the synchronizer sets it
    # Why only the worker that saved its state can continue from it. None: any can, see `transfer.share`.
    unshared: str | None = "a part keeps state that may differ between workers"

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        """Receive its index in the list, the optimizers, and the function that takes reports."""

    def communicators(self) -> list[Communicator]:
        """Return every communicator it uses. Connects them at the first call."""
        return [self.peers.everyone]

    def plan(self, clock: Clock) -> None:
        """An iteration begins, with a gradient or without."""

    def before(self, clock: Clock) -> bool:
        """Gradients are ready. Return False if this part makes the step in place of the optimizer."""
        return True

    def stepped(self, optimizer: Optimizer) -> None:
        """The caller has stepped an optimizer that a part replaces. Its gradients are final now."""

    def release(self) -> None:
        """The local step is over, or has failed: undo temporary changes."""

    def after(self, clock: Clock) -> Landing | None:
        """Parameters have moved. Return what landed, if anything did."""
        return None

    def again(self, clock: Clock) -> bool:
        """Return whether one more iteration without a gradient follows. If so, this part has made it."""
        return False

    def follow(self, landing: Landing) -> None:
        """Another part landed among more workers than share this part's anchor: move the anchor there."""

    def shown(self) -> dict[str, Tensor]:
        """Return what `averaged()` shows in place of live parameters, by name."""
        return {}

    def flush(self, clock: Clock) -> None:
        """The run ends: land what is in flight."""

    def leave(self, departure: Departure) -> None:
        """This worker fails: tell the workers that wait for it, and end threads."""
        self.peers.everyone.worker.leave(departure)  # and every communicator split from it

    def flush_reports(self, *, wait: bool) -> None:
        """Emit the reports that are complete; with `wait`, all of them."""

    def state_dict(self) -> State:
        """Return everything it needs to continue. Waits for messages in flight, but does not apply them."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved state."""


@contextmanager
def hold_gradients(parts: Sequence[Part]) -> Iterator[None]:
    """Inside, no gradient is sent, because more backward passes of the same step follow."""
    senders = [part.sender for part in parts if part.sender is not None]
    before = [sender.held for sender in senders]
    for sender in senders:
        sender.held = True
    try:
        yield
    finally:
        for sender, held in zip(senders, before, strict=True):
            sender.held = held


@contextmanager
def paused(parts: Sequence[Part]) -> Iterator[None]:
    """Evaluate or save inside. Schedules that measure time do not count it."""
    ledgers = [part.ledger for part in parts if part.ledger is not None]
    for ledger in ledgers:
        ledger.pause(over=False)
    try:
        yield
    finally:
        for ledger in ledgers:
            ledger.pause(over=True)


def check_samples(samples: float, parts: Sequence[Part]) -> None:
    """Raise unless `samples` can be a weight, and every part weighs its workers."""
    if not is_number(samples) or not 0 <= samples < math.inf:
        raise ValueError(f"step(samples={samples!r}): samples must be a finite number, at least 0.")
    for part in parts:
        if not part.weighs:
            raise ValueError(f"step(samples={samples!r}): {part!r} does not weigh workers: omit samples.")


def check_parts(parts: Sequence[Part]) -> None:
    """Raise unless all parts have one model, and each that relies on another comes directly after it."""
    if not parts:
        raise ValueError("Synchronizer(optimizer, []): pass at least one part.")
    if any(part.model is not parts[0].model for part in parts):
        raise ValueError("Synchronizer(...): all parts must be of one model.")
    for before, part in zip([None, *parts], parts, strict=False):
        if part.follows is not None and part.follows is not before:
            name, other = type(part).__name__, type(part.follows).__name__
            raise ValueError(
                f"Synchronizer(...): {name} must stand directly after the {other} it was given: list them as "
                f"[exchange, {name}(exchange, ...)]."
            )


def check_timed(parts: Sequence[Part]) -> bool:
    """Return whether rounds follow the clock. Raise if a part needs workers that make the same steps."""
    timed = [part for part in parts if part.when is not None and part.when.timed]
    for clocked in timed:
        call = f"{clocked.when!r}"
        if not clocked.weighs:
            raise ValueError(
                f"{call} weighs workers by their steps, but {clocked!r} does not: use Every(...)."
            )
        for part in parts:
            over = isinstance(part.when, Then) and part.when.second == Never()  # a synchronous warm-up
            alone = part.when is not None and part.peers.at(0).size == 1
            if part is not clocked and not (over or alone or (part.when is None and part.weighs)):
                why = "lets workers make different numbers of steps"
                raise ValueError(f"{call} {why}, but {part!r} needs the same on all: use Every(...).")
    return bool(timed)


def check_update(update: Update | None, delay: Delay, live: Live, peers: Peers) -> Update:
    if update is not None and not isinstance(update, Update):
        raise TypeError(f"update={update!r}: pass an update, such as Replace() or Outer(SGD(lr=0.7)).")
    update = Replace() if update is None else update
    if isinstance(live, OptimizerState) and update != Replace():
        raise ValueError(f"update={update!r} with {live!r}: moments are averaged: leave update out.")
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
        why = "the steps made during the delay would be lost"
        raise ValueError(f"delay={delay!r} with update={update!r}: {why}.")
    return update


def check_reducer(reduce: Reducer | None, update: Update, live: Live) -> Reducer:
    """Return the reducer to use. An update that has its own code is its own reducer."""
    if reduce is not None and not isinstance(reduce, Reducer):
        raise TypeError(f"reduce={reduce!r}: pass a reducer, such as Mean().")
    if isinstance(update, Reducer) and reduce is not None:
        raise ValueError(f"reduce={reduce!r} with update={update!r}, which has its own: leave reduce out.")
    if isinstance(update, Reducer):
        return update
    chosen = Mean() if reduce is None else reduce
    if isinstance(live, OptimizerState) and chosen != Mean():
        raise ValueError(f"reduce={chosen!r} with {live!r}: moments are sent exactly; leave reduce out.")
    if live.early:
        return chosen.for_gradients()
    if not chosen.agrees:
        raise ValueError(f"reduce={chosen!r}: workers get different results: use it for grads(model) only.")
    if chosen.lossy and update.sends == "weights" and update.anchors == "own":
        why = f"{type(update).__name__} accepts no lossy code, because it sends the weights themselves"
        raise ValueError(f"reduce={chosen!r}: {why}: leave reduce out.")
    if chosen.lossy and update.sends == "weights":
        raise ValueError(
            f"reduce={chosen!r} with update={update!r}: the weights themselves would be rounded; send the "
            "difference from an anchor, with update=Outer(SGD(lr=1)), which also averages."
        )
    if chosen.remembers and isinstance(update, Rebase) and update.gain < 1:
        raise ValueError(
            f"reduce={chosen!r} with update={update!r}: values that were not sent would be kept by the "
            "worker and by the residual, and sent twice; use gain=1.0, or leave out the feedback."
        )
    return chosen


def find_unshared(update: Update, reduce: Reducer, delay: Delay, peers: Peers, when: Schedule) -> str | None:
    """Return why only the worker that saved the state of such an exchange can use it; None if any can."""
    if when.timed:
        return "its workers make different numbers of steps"
    alone = isinstance(peers, Subgroups) and peers.ranks == 1 and delay == 0
    if not isinstance(peers, World) and not alone:
        return "its workers meet in groups"
    if update.anchors == "own":
        return "each worker has an anchor of its own"
    return None if reduce.agrees or delay == 0 else "each worker gets a mean of its own"


def check_drift(drift: bool | None, when: Schedule, reduce: Reducer, live: Live) -> bool:
    """Return whether rounds report drift or loss. Drift cannot be measured with a lossy reducer."""
    if reduce.lossy and (drift or "drift" in when.needs):
        both = f"{'drift=True' if drift else repr(when)} with reduce={reduce!r}"
        raise ValueError(f"{both}: drift cannot be measured with a lossy reducer: use Mean().")
    if when.needs and drift is False:
        why = "which needs the measurements of rounds: leave drift out"
        raise ValueError(f"drift=False with {when!r}, {why}.")
    if isinstance(live, OptimizerState) and (drift or when.needs):
        what = "drift=True" if drift else repr(when)
        raise ValueError(f"{what} with {live!r}: rounds of moments measure neither drift nor loss.")
    return (
        bool(when.needs) or not (isinstance(live, OptimizerState) or live.early or reduce.lossy)
        if drift is None
        else drift
    )
