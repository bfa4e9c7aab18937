"""What travels in a round: what the update sends, and what rides along."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.base.tensors import Live, Share
from offbeat.engine.extras import BufferRule, Buffers, MomentRule, Moments, land
from offbeat.engine.round import Round


class Payload:
    """Live tensors, the notes that go with them, buffers and moments: packed together, landed together."""

    def __init__(
        self, live: Live, buffers: BufferRule, moments: MomentRule, *, in_place: bool = False
    ) -> None:
        self.live, self._in_place = live, in_place
        self.buffers, self.moments = Buffers(live.model, buffers), Moments(live, moments)
        self._room: Packed | None = None
        self.late = False  # whether landed tensors may hold values of another round than the notes

    @property
    def room(self) -> Packed:
        """Where payloads are packed, the same memory every time: at most one round is in the air.

        In place it is the live tensors' own, if these lie one after the other; should they be moved later,
        they are copied there and back.
        """
        if self._room is None:
            extras = {f"+{name}": t for name, t in {**self.live.notes(), **self.buffers.averaged()}.items()}
            flat = Packed.around(self.live.like()) if self._in_place else None
            if flat is None:
                self._room = Packed.like({**self.live.like(), **extras})
            else:
                self._room = flat.beside(Packed.like(extras)) if extras else flat
        return self._room

    @property
    def own(self) -> Packed:
        """The update's part of that memory."""
        return self.room.cut(len(self.live.names))[0]

    def pack(
        self, outgoing: Callable[[Sequence[Tensor], Packed], None], share: Share | None = None
    ) -> Packed:
        """The payload: what `outgoing(live, room)` writes, then what rides along. `share` stands for the live
        tensors and their notes if it was taken earlier."""
        notes, live = share or (self.live.notes(), self.live.tensors())
        buffers = self.buffers.averaged()
        own, extras = self.room.cut(len(live))
        outgoing(live, own)
        extras.read([*notes.values(), *buffers.values()])
        return self.room

    def land(self, round_: Round, incoming: Callable[[Sequence[Tensor], Packed], None]) -> None:
        """Apply what has arrived: `incoming(live, mean)`, then what rode along."""
        live, moments = self.live.tensors(), round_.moments.wait()
        own, notes, buffers = round_.mean.wait().cut(len(live), len(self.live.notes()))
        incoming(live, own)
        self.live.landed(notes.views, late=self.late)
        found = self.moments.found() if moments.names else {}
        news = [*buffers.views, *round_.followed.wait(), *moments.views]
        land(self.extras({name: found[name] for name in moments.names}), news, round_.sent)
        self.moments.reset()

    def extras(self, moments: dict[str, Tensor]) -> list[Tensor]:
        """Buffers averaged, buffers followed, moments averaged."""
        return [*self.buffers.averaged().values(), *self.buffers.followed().values(), *moments.values()]
