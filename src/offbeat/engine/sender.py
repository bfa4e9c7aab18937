"""How the payload of a round is sent."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Share
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.engine.extras import Payload
from offbeat.engine.round import Rhythm, Round
from offbeat.reduce import Reducer
from offbeat.update.update import Update

PendingHeaders = Pending[list[list[int]]]


class Sender:
    """Sends a payload as a whole when its round begins. `states` are those of the update and the reducer."""

    parts: Sequence[Packed] = ()  # parts that are sent one by one
    held = False  # whether more backward passes of the same step follow

    def __init__(self, payload: Payload, update: Update, reduce: Reducer) -> None:
        self.payload, self.update, self.reduce = payload, update, reduce

    def init(self) -> State:
        """Return the initial state of the reducer."""
        return self.reduce.init()

    def connect(self, everyone: Communicator) -> Metered | None:
        """Prepare for rounds. All ranks call this. Return the communicator of messages outside of rounds."""
        return None

    def check_unchanged(self, round: Round, weight: float) -> float:
        """The round begins. Return the weight, or `AGAIN` if gradients have changed since they were sent."""
        return weight

    def start(
        self, round: Round, share: Share, factor: float, heads: PendingHeaders, states: dict[str, State]
    ) -> Pending[Packed]:
        """Send the live tensors times `factor`; extras are packed already. `heads` are all headers."""
        self.pack(round, share, factor, states)
        memory = states.get("reduce", states["update"])  # an update that owns its code has one state
        return self.reduce.start(self.payload.packed, round.comm, round.clock, memory)

    def pack(self, round: Round, share: Share, factor: float, states: dict[str, State]) -> None:
        """Pack what the update sends, times `factor`."""
        self.update.outgoing(share[1], self.payload.own, round.clock, states["update"])
        if factor != 1:
            self.payload.packed.scale(factor)

    def reweigh(self, states: dict[str, State], factor: float) -> None:
        """The mean of a round was multiplied by `factor`: what the code keeps must not weigh more."""
        memory = states.get("reduce", {})
        for part in memory.get("parts", [memory] if memory else []):
            self.reduce.reweigh(part, factor)

    def prepare_next(self, clock: Clock, rhythm: Rhythm, states: dict[str, State]) -> None:
        """A round has landed: prepare for the next."""

    def rewind(self, states: dict[str, State]) -> dict[str, State]:
        """Return the states as they were before any part was sent early."""
        return states

    def check(self, states: dict[str, State]) -> None:
        """Raise unless saved states fit."""

    def drain(self, states: dict[str, State]) -> None:
        """The round of parts that were sent early never begins. Every rank calls this."""

    def close(self, *, wait: bool) -> None:
        """The run is over."""
