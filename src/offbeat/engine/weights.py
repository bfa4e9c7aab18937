"""How much each worker counts in a round: by its samples, its steps, or not at all."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal

from offbeat.base.clock import Clock, State

Headers = Sequence[Sequence[int]]  # the headers of a round, in the order of ranks

# The weight in a header. 0 and above: a number of samples or steps. Below 0, it says what is sent:
NO_WEIGHT = -1.0  # the whole payload
AGAIN = -2.0  # the whole payload again: gradients of this worker have changed since they were sent
SHARE = -3.0  # SHARE − s: the payload times s, which is below 1

ROUND = 0  # the kind of a header, a number below 8; `headers` has the others
PLACE = 16  # bits of the index of the part in its word; those above hold the microseconds waited so far

# Flags above the kind.
DRY, OUTLIER, BROKEN, COUNTED, TIMED, RATES, JOINED = (8 << i for i in range(7))
DROPPED = OUTLIER | BROKEN


class Tally:
    """What this worker has done since the last round.

    If the caller gives samples, these are its weight, and all workers wait for all weights before they send.
    Otherwise a worker sends its payload times its share of the steps, without waiting, and the mean is
    divided by the sum of the shares when it lands. A worker that has run dry makes no steps.
    """

    def __init__(self, *, early: bool, timed: bool, rated: bool = False) -> None:
        self._early, self._timed = early, timed
        self._flags = (TIMED | RATES * rated) * timed  # rated: the update depends on the learning rates
        self.dry = self.idle = False  # whether it is dry now, and whether no round is planned
        self.ended, self.void_at = False, -1  # whether all were dry in a round; the step of a void round
        self.joined = False  # whether this worker has joined since the last round that landed
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to count after this step."""
        self.samples, self.missed, self.since = NO_WEIGHT, 0, step
        self.special = self._timed or self.dry  # whether its weight may differ from that of most workers

    def add(self, clock: Clock) -> None:
        """An iteration begins. Unless `special`, one with a gradient and without samples needs no call."""
        self.dry = clock.dry
        self.missed += clock.dry
        if clock.samples is not None:
            self.samples = max(self.samples, 0.0) + clock.samples
        self.special = self._timed or self.dry or self.missed > 0 or self.samples >= 0

    def count_steps(self, step: int) -> int:
        """Return how many steps this worker has made."""
        return step - self.since - self.missed

    def word(self, step: int, dropped: int = 0) -> tuple[float, int]:
        """Return the weight and the flags of this worker's header, after this step."""
        flags = self._flags | dropped | (DRY | JOINED * self.joined) * self.dry
        flags |= COUNTED * (self._timed and self.samples < 0)
        made, passed = self.count_steps(step), step - self.since
        if self.samples >= 0 or self._timed:
            weight = self.samples if self.samples >= 0 else float(made)
            return (0.0 if dropped else weight), flags
        # A gradient is that of one step.
        share = float(not self.dry) if self._early else (made / passed if passed else 1.0)
        share = 0.0 if dropped else share
        return (NO_WEIGHT if share == 1 else SHARE - share), flags

    def land(self, step: int, *, void: bool, all_dry: bool) -> None:
        """A round has landed in which workers had different weights."""
        self.void_at, self.ended = step if void else -1, self.ended or all_dry
        self.joined = False

    def revive(self, step: int) -> None:
        """All workers had run dry, and continue together."""
        self.ended = False
        self.restart(step)

    def put_back(self, before: State) -> None:
        """A round is repeated: count again what its beginning had reset."""
        self.since, self.missed = before["since"], self.missed + before["missed"]
        if before["samples"] >= 0:
            self.samples = before["samples"] + max(self.samples, 0.0)
        self.special = True

    def skip(self, step: int) -> None:
        """This worker has just joined, and has made none of the steps until this one."""
        self.missed, self.special, self.joined = step - self.since, True, True

    def state_dict(self) -> State:
        return {name: getattr(self, name) for name in ("samples", "since", "missed", "ended", "void_at")}

    def load_state_dict(self, state: State) -> None:
        vars(self).update(state)
        self.special = True  # until the next round begins


class Weights:
    """The weights of all workers of a round, from their headers."""

    def __init__(self, heads: Headers) -> None:
        words = read_words(heads)
        self.size, self._known = len(words), max(words) >= 0  # whether all know all weights before they send
        self.all_dry = all(head[0] & DRY for head in heads)
        self.dropped = {head[6] % 2**31: head[0] & DROPPED for head in heads if head[0] & DROPPED}
        self.nobody = len(self.dropped) == self.size
        self._shares = [1.0 if word in (NO_WEIGHT, AGAIN) else max(word, SHARE - word) for word in words]
        # Whether no worker has anything to send, because all are dry and have made no step.
        self.void = self.all_dry and not any(self._shares) and not self.dropped
        if (self._known or self.dropped) and not any(self._shares):
            self._shares = [float(not head[0] & DROPPED) for head in heads]
        # If all are dry, they also know all shares before they send.
        self._even = len(set(self._shares)) == 1 and (self.all_dry or self._known) and not self.nobody

    def before(self, rank: int) -> float:
        """Return the factor of this worker's payload, if it waits for all weights."""
        own = self._shares[rank]
        if self._even or own == 0:
            return float(self._even)
        return self.size * own / math.fsum(self._shares) if self._known else own

    def after(self) -> float:
        """Return the factor that makes the mean Σ w x / Σ w."""
        return 1.0 if self._known or self._even or self.nobody else self.size / math.fsum(self._shares)


def factor_of(word: float) -> float:
    """Return the factor of a payload whose worker does not wait for the weights of others."""
    return 1.0 if word in (NO_WEIGHT, AGAIN) else SHARE - word


def read_words(heads: Headers) -> tuple[float, ...]:
    """Return the weight in each header."""
    return struct.unpack(f"<{len(heads)}d", struct.pack(f"<{len(heads)}q", *[head[7] for head in heads]))


Unit = Literal["none", "samples", "steps"]


def unit(head: Sequence[int], word: float) -> Unit | None:
    """Return the unit of a worker's weight; None if it is zero, which fits any unit."""
    if head[0] & COUNTED:
        return "steps" if word or not head[0] & (DRY | DROPPED) else None
    if word == SHARE and head[0] & (DRY | DROPPED):
        return None
    return "samples" if word >= 0 else "none"
