"""The rhythm of an exchange, which says when its rounds happen, and one round from begin to report."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.errors import PeerLost
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.engine.agreement import copy_state
from offbeat.engine.guard import name_dropped
from offbeat.engine.headers import compare_headers, compare_members
from offbeat.engine.report import Report
from offbeat.engine.weights import DROPPED, DRY, JOINED, NO_WEIGHT, PLACE, Weights, factor_of
from offbeat.reduce.code import Staged
from offbeat.when import LATER, Every, Schedule, Then

Delay = int | Literal["round"]
Act = Literal["land", "advance", "begin"]
_ONE = struct.unpack("<q", struct.pack("<d", NO_WEIGHT))[0]  # as a word of a header


class Rhythm:
    """When rounds begin, advance and land: a state machine that the engine and the planner drive.

    At most one round is in flight. It lands `delay` steps after it began, or when the next one begins if
    that is earlier. A round of n messages advances when i/n of its delay has passed, for i = 1 … n − 1.
    """

    def __init__(self, when: Schedule, delay: Delay) -> None:
        shortest = when.shortest
        if delay != "round" and not is_whole(delay, 0):
            raise ValueError(f'delay={delay!r}: delay must be a number of steps, at least 0, or "round".')
        if delay != "round" and shortest is not None and delay > shortest:
            raise ValueError(
                f"delay={delay} with {when!r}: delay must not exceed the period, which can be {shortest}."
            )
        if when.timed and delay:
            why = "workers would be in different rounds between their steps"
            raise ValueError(f"delay={delay!r} with {when!r}: {why}: leave delay out, or use Budget(...).")
        self.when, self.delay = when, delay
        self.memory: State = when.init()
        self.planned: int | None = None  # the step after which the next round begins
        self.round = self.began = 0  # the number of rounds begun, and the step after which the last began
        self.in_air = False
        self.running = False  # whether a period has begun whose end is not known yet
        self.lands: int | None = None  # the step after which the round in flight lands, once known
        self.advances: list[int] = []  # the steps after which it advances
        self._messages = 1

    def _aim(self) -> None:
        """Work out when the round in flight advances and lands."""
        self.lands, n = self.planned, self._messages
        if self.delay != "round":
            due = self.began + self.delay
            self.lands = due if self.planned is None else min(due, self.planned)
        if self.lands is not None and n > 1:
            flight = self.lands - self.began
            self.advances = [self.began - (-i * flight // n) for i in range(1, n)]

    def plan(self, clock: Clock) -> None:
        """Before a step, if no round is planned: ask the schedule for the next one."""
        delay = math.inf if self.delay == "round" else self.delay
        planned = self.when.next(replace(clock, round=self.round, delay=delay), self.memory)
        self.running = planned == LATER
        self.planned = None if self.running else planned
        past = self.planned is not None and self.planned <= clock.step
        assert not past, f"{self.when!r} plans step {self.planned} after step {clock.step}"
        if self.in_air:
            self._aim()

    def acts(self, step: int) -> list[Act]:
        """Return what happens after this step, in order."""
        acts: list[Act] = ["land"] if step == self.lands else ["advance"] * self.advances.count(step)
        if step == self.planned:
            acts += ["begin", "land"] if self.delay == 0 else ["begin"]
        return acts

    def next_act(self, step: int) -> int | None:
        """Return the next step after which something happens, as far as it is known now."""
        known = (*self.advances, self.lands, self.planned)
        return min((other for other in known if other is not None and other > step), default=None)

    def is_certain(self, step: int) -> bool:
        """Whether a round begins after this step for any learning rate and any measurement."""
        when = self.when
        while isinstance(when, Then):
            when = when.first if step <= when.switch else when.second
        return when == Every(1)

    def begin(self, step: int, messages: int = 2) -> None:
        """A round has begun, with this number of successive messages. The planner assumes two."""
        self.planned, self.began, self.in_air, self._messages = None, step, True, messages
        self.running = False
        self.round += 1
        self._aim()

    def land(self) -> None:
        self.in_air, self.lands, self.advances = False, None, []

    def state_dict(self) -> State:
        return {name: getattr(self, name) for name in ("planned", "round", "began", "in_air", "memory")}

    def load_state_dict(self, state: State) -> None:
        """A round in flight had arrived when it was saved, so it no longer advances."""
        self.land()
        vars(self).update(state)
        self._messages = 1
        if self.in_air:
            self._aim()


class Round:
    """One round of a part as this worker sees it: its workers, its messages, and what they cost.

    A part opens a round, compares the workers by a header, adds what it sends to `messages`, and closes with
    a report. `clock` is the clock when it begins, `since` the step of the round before.
    """

    def __init__(self, clock: Clock, comm: Communicator, *, since: int) -> None:
        self.clock, self.since, self.comm = clock, since, Metered(comm)
        self._now, self.began = comm.now, comm.now()
        self.waited = 0.0  # seconds this worker has waited for it
        self.flown = 0.0  # the seconds its messages took, if it was loaded from a checkpoint
        self.messages: list[Pending[Any]] = []
        self.heads: Pending[list[list[int]]] | None = None  # all headers; raises unless all workers are here
        self.alike = False  # whether all workers have weight one and no flags
        self.void = self.all_dry = self.nobody = False  # see `Weights`
        self.dropped = 0  # the reason why the guard leaves this worker out
        self.factor = 1.0  # makes the mean Σ w x / Σ w
        self._weighed = False  # whether the mean has been divided by the weights
        self.mean: Pending[Packed]
        self.followed: Pending[list[Tensor]] | None = None  # rank 0's buffers
        self.moments: Pending[Packed] | None = None
        self.sent: list[Tensor] | None = None  # the extras as they were sent, if the round lands late
        # In an elastic run: the members, when each entered, whether one is lost, how often one was.
        self.members: tuple[str, ...] = ()
        self.entered: tuple[int, ...] = ()
        self.broken, self.repeats = False, 0

    def compare(
        self, part: int, rates: int, rank: int, digest: int = 0, weight: float = NO_WEIGHT,
        waited: float = 0, flags: int = 0,
    ) -> Pending[list[list[int]]]:  # fmt: skip
        """Send a header. The result is the headers of all workers; it raises unless all are in this round.

        `part` is the index in the method, `rates` a digest of the learning rates, `rank` the rank among all
        workers, and `waited` the seconds that this worker has waited in the whole run.
        """
        clock, place = self.clock, part + (int(waited * 1e6) << PLACE)
        lr, word = struct.unpack("<2q", struct.pack("<2d", clock.lr, weight))
        words = (flags, place, clock.round, clock.step, lr, rates, rank + (digest << 31), word)
        self.heads = heads = self.comm.tell(words).then(self._check)
        self.messages.append(heads)
        return heads

    def _check(self, heads: list[list[int]]) -> list[list[int]]:
        """Raise unless all workers are at the same point. Usually all their words are equal."""
        words = [(head[0], head[1] % 2**PLACE, *head[2:6], head[7]) for head in heads]
        if words != words[:1] * len(words):
            if self.entered:
                compare_members(heads, self.comm.rank, self.entered)
            else:
                compare_headers(heads)
        else:
            self.alike = words[0][0] == 0 and words[0][6] == _ONE
        return heads

    def weigh(self, word: float, flags: int) -> float:
        """Return the factor of this worker's payload. Wait for all weights if it depends on them."""
        self.dropped = flags & DROPPED
        if word < 0 and not flags & DRY:
            return factor_of(word)
        assert self.heads is not None
        with self.waiting():
            weights = Weights(self.heads.wait())
        self.void = weights.void
        return weights.before(self.comm.rank)

    def take(self) -> Packed:
        """Return the mean Σ w x / Σ w, once all messages have arrived."""
        mean = self.mean.wait()
        if self.heads is not None and not self.alike and not self._weighed:
            weights, self._weighed = Weights(self.heads.wait()), True
            self.all_dry, self.nobody, self.factor = weights.all_dry, weights.nobody, weights.after()
            name_dropped(self.clock, weights.dropped)
            mean.scale(self.factor)
            if self.moments is not None:
                self.moments.wait().scale(self.factor)
        return mean

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work on this round, as a range in a profile. The error for a lost worker names the round."""
        # Without a profiler, a range would still cost as much as ten small sums.
        recorded = record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()
        with recorded:
            try:
                yield
            except PeerLost as error:
                raise error.during(self.clock.round, self.clock.step) from error.__cause__

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds inside as waited."""
        start = self._now()
        try:
            yield
        finally:
            self.waited += self._now() - start

    def wait(self) -> None:
        start = self._now()
        try:
            for message in self.messages:
                message.wait()
        finally:
            self.waited += self._now() - start

    def advance(self) -> None:
        """Run the next stage of the mean, if one is left."""
        if isinstance(self.mean, Staged) and self.mean.stages:
            with self.phase("offbeat.advance"):
                start = self._now()
                try:
                    self.messages[0].wait()  # the header: all workers are in this round
                    self.mean.advance()
                finally:
                    self.waited += self._now() - start

    def report(self, kind: type[Report] = Report, **fields: Any) -> Report:
        """Return what the round cost, after `wait`. `fields` replace measured values or add others."""
        landed = max([message.arrived() for message in self.messages], default=self.began + self.waited)
        clock, comm, seconds = self.clock, self.comm, max(0.0, landed - self.began, self.flown)
        place = {"step": clock.step, "round": clock.round, "period": clock.step - self.since}
        costs = {"bytes_sent": comm.sent, "bytes_received": comm.received, "seconds_waited": self.waited}
        rest: State = {"workers": comm.size, "seconds_in_air": seconds, "drift": None, "norm": None}
        if self.heads is not None:
            heads = self.heads.wait()
            if not self.alike:
                rest["dropped"] = tuple([head[6] % 2**31 for head in heads if head[0] & DROPPED])
            waits = [(head[1] >> PLACE) / 1e6 for head in heads]
            rest |= {"waited_mean": sum(waits) / len(waits), "waited_max": max(waits)}
            if self.members:
                joined = sum(head[0] & JOINED != 0 for head in heads)
                rest |= {"members": self.members, "repeats": self.repeats, "joined": joined}
        return kind(**{**place, **costs, **rest, **fields})

    def state_dict(self) -> State:
        """Wait for the messages, and save them without applying them."""
        with self.phase("offbeat.wait"):
            self.wait()
        clock = self.clock
        return {
            "step": clock.step,
            "round": clock.round,
            "lr": clock.lr,
            "since": self.since,
            "bytes": [self.comm.sent, self.comm.received],
            "seconds": [self.waited, self.report().seconds_in_air],
            "mean": [flat.clone() for flat in self.take().flats],
            "weighed": [self.void, self.all_dry, self.nobody, self.dropped, self.factor],
            "followed": copy_state(None if self.followed is None else self.followed.wait()),
            "moments": None if self.moments is None else self.moments.wait().tensors(),
            "sent": copy_state(self.sent),
        }

    @classmethod
    def resume(cls, state: State, comm: Communicator, packed: Packed) -> Round:
        """Return a round whose messages have all arrived. Its mean is in `packed`."""
        torch._foreach_copy_(packed.flats, state["mean"])
        round = cls(Clock(state["step"], state["round"], state["lr"]), comm, since=state["since"])
        round.comm.sent, round.comm.received = state["bytes"]
        round.waited, round.flown = state["seconds"]
        round.mean = arrived(packed)
        round.void, round.all_dry, round.nobody, round.dropped, round.factor = state["weighed"]
        if state["followed"] is not None:
            round.followed = arrived(copy_state(state["followed"]))
        if state["moments"] is not None:
            moments = Packed.like(state["moments"])
            moments.read(list(state["moments"].values()))
            round.moments = arrived(moments)
        round.sent = copy_state(state["sent"])
        return round
