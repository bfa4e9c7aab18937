"""How the payload of a round leaves."""

from __future__ import annotations

from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Share
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.engine.extras import Payload
from offbeat.engine.round import Rhythm, Round
from offbeat.reduce import Mean, Reducer
from offbeat.reduce.rounded import send
from offbeat.update.update import Replace, Update

Heads = Pending[list[tuple[int, float]]]


class Sender:
    """Sends a payload as a whole when its round begins. `states` are those of the update and the reducer."""

    held = False  # more backward passes of the same step follow

    def __init__(self, payload: Payload, update: Update, reduce: Reducer) -> None:
        self.payload, self.update, self.reduce = payload, update, reduce

    def init(self) -> State:
        """The state of the reducer."""
        return self.reduce.init()

    def connect(self, everyone: Communicator) -> Metered | None:
        """Prepare for rounds, with all ranks. Return what carries messages outside of rounds."""
        return None

    def check_unchanged(self, round: Round, weight: float) -> float:
        """The round begins. Return the weight, or a word that says that what has left has changed since."""
        return weight

    def start(
        self, round: Round, share: Share, factor: float, heads: Heads, states: dict[str, State]
    ) -> Pending[Packed]:
        """Send this worker's share times `factor`. The mean arrives. `heads` brings the word of everyone."""
        packed, live = self.payload.packed, self.pack_extras(share)
        if self.reduce == Mean() and self.update == Replace() and factor == 1:
            return send(packed, round.comm, live)
        self.pack(round, live, factor, states)
        memory = states.get("reduce", states["update"])  # an update that owns its code has one state
        return self.reduce.start(packed, round.comm, round.clock, memory)

    def pack_extras(self, share: Share) -> list[Tensor]:
        """Pack all but the live tensors, which are returned."""
        payload, (notes, live) = self.payload, share
        if len(payload.packed.names) > len(live):
            payload.packed.cut(len(live))[1].read([*notes.values(), *payload.buffers.averaged().values()])
        return live

    def pack(self, round: Round, live: list[Tensor], factor: float, states: dict[str, State]) -> None:
        """Pack what the update sends, times `factor`."""
        self.update.outgoing(live, self.payload.own, round.clock, states["update"])
        self.payload.packed.scale(factor)

    def landed(self, clock: Clock, rhythm: Rhythm, states: dict[str, State]) -> None:
        """A round has landed."""

    def settled(self, states: dict[str, State]) -> dict[str, State]:
        """The states between two rounds."""
        return states

    def check(self, states: dict[str, State]) -> None:
        """Raise unless saved states fit."""

    def drain(self, states: dict[str, State]) -> None:
        """The round of what has left never begins. Every rank calls this."""

    def close(self, *, wait: bool) -> None:
        """The run is over."""
