"""Applies the mean of a round that has arrived."""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.base.clock import Clock, State
from offbeat.engine.extras import Payload
from offbeat.engine.guard import Guard
from offbeat.engine.optimizers import reset
from offbeat.engine.round import Round
from offbeat.engine.weights import BROKEN
from offbeat.reduce import Mean, Reducer
from offbeat.update.update import Replace, Update

Distances = tuple[float | None, float | None]


def is_plain(update: Update, reduce: Reducer) -> bool:
    """Whether the live tensors themselves are sent, and replaced by their exact mean."""
    return reduce == Mean() and update == Replace()


class Arrival:
    """Writes live tensors, buffers and moments when a round lands. `late`: some steps after it began."""

    def __init__(
        self, payload: Payload, update: Update, reduce: Reducer, guard: float | None, late: bool, drift: bool
    ) -> None:
        self.payload, self.update, self.reduce, self.late, self.drift = payload, update, reduce, late, drift
        self.guard = None if guard is None else Guard(guard, update, reduce, payload.live)
        if guard is not None and payload.buffers.rule == "follow":
            raise ValueError(
                f'guard={guard!r} with buffers="follow": all workers would take the buffers of rank 0 even '
                'if it is left out: use buffers="average" or "keep".'
            )
        self.plain = is_plain(update, reduce)

    def __str__(self) -> str:
        return "" if self.guard is None else f", guard={self.guard.limit}"

    def init(self) -> dict[str, State]:
        """The states of what an exchange may lack."""
        return {} if self.guard is None else {"guard": self.guard.init()}

    def judge(self, states: Mapping[str, State], steps: int) -> int:
        """Return why the guard leaves this worker out of the round that begins; 0 if it does not."""
        if self.guard is None or steps == 0:
            return 0
        return self.guard.judge(self.payload.live.tensors(), self.payload.own, states)

    def note_start(self, states: Mapping[str, State], round: Round | None = None) -> None:
        """A period begins, with a round that is in the air, if there is one."""
        if self.guard is not None and (round is None or round.dropped != BROKEN):
            self.guard.note(self.payload.live.tensors(), self.payload.own, states["guard"])

    def apply(self, round: Round, clock: Clock, states: Mapping[str, State]) -> Distances:
        """Write what has arrived. Return |x − x̄|² and the squared length of the change, as far as known."""
        mean = round.take()
        if round.void:
            return None, None
        payload, live = self.payload, self.payload.live
        own, notes, buffers = mean.cut(*payload.lengths)
        if round.dropped:
            distances: Distances = (0.0, None)
            assert self.guard is not None
            self.guard.land(live.tensors(), own, clock, states, nobody=round.nobody)
            self.note_start(states)
            round.sent = None  # it takes the extras as they arrive, since its own may not be finite
        elif self.plain and self.drift:
            distances = (own.write_and_measure(live.tensors()),) * 2
        else:
            tensors, state, distances = live.tensors(), states["update"], (None, None)
            if self.drift and not self.reduce.lossy:
                distances = self.update.distances(tensors, own, state)
            self.update.incoming(tensors, own, clock, state)
        if live.early:
            # With a delay or a residual, the mean may be nonzero where no worker has a gradient now.
            live.land_notes(notes.views, late=self.reduce.remembers or self.late)
        if payload.has_extras and not round.nobody:
            payload.land_extras(buffers.views, round)
        for optimizer in payload.moments.optimizers if round.dropped == BROKEN else ():
            reset(optimizer, live.parameters)
        return distances
