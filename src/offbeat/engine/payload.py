"""What travels in a round: the update's share of the live tensors, and the extras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.base.tensors import Live
from offbeat.engine.extras import BufferRule, Buffers, MomentRule, Moments, land, send_mean
from offbeat.engine.round import Round


class Payload:
    """The memory in which live tensors, their notes and averaged buffers travel, the same in every round."""

    def __init__(
        self, live: Live, buffers: BufferRule, moments: MomentRule, *, in_place: bool = False
    ) -> None:
        self.live, self._in_place = live, in_place
        self.buffers, self.moments = Buffers(live.model, buffers), Moments(live, moments)
        self._parts: tuple[Packed, Packed, Packed] | None = None  # all of it, the update's share, the extras

    def _allocate(self) -> tuple[Packed, Packed, Packed]:
        """In place, the live tensors' own memory serves if they lie one after the other. If they are moved
        later, they are copied there and back."""
        if self._parts is None:
            extras = {f"+{name}": t for name, t in {**self.live.notes(), **self.buffers.averaged()}.items()}
            flat = Packed.around(self.live.like()) if self._in_place else None
            if flat is None:
                packed = Packed.like({**self.live.like(), **extras})
            else:
                packed = flat.beside(Packed.like(extras)) if extras else flat
            own, rest = packed.cut(len(self.live.names))
            self._parts = (packed, own, rest)
        return self._parts

    @property
    def packed(self) -> Packed:
        """All that travels. At most one round is in the air."""
        return self._allocate()[0]

    @property
    def own(self) -> Packed:
        """The update's share of it."""
        return self._allocate()[1]

    def read_extras(self, notes: Mapping[str, Tensor]) -> None:
        """Pack the notes and the averaged buffers."""
        self._allocate()[2].read([*notes.values(), *self.buffers.averaged().values()])

    def cut(self, mean: Packed) -> list[Packed]:
        """The update's share, the notes and the buffers of a mean that has arrived."""
        return mean.cut(len(self.live.names), len(self.live.notes()))

    def send_extras(self, moments: dict[str, Tensor], round: Round, *, late: bool) -> None:
        """Send rank 0's buffers and the moments. Keep what was sent if the round lands late."""
        if late:
            round.sent = [value.clone() for value in self._extras(moments)]
        round.followed = self.buffers.follow(round.comm)
        round.moments = send_mean(moments, round.comm) if moments else None
        round.messages += [message for message in (round.followed, round.moments) if message is not None]

    def land_extras(self, buffers: Sequence[Tensor], round: Round) -> None:
        """Apply the buffers and moments that have arrived."""
        news, chosen = list(buffers), {}
        if round.followed is not None:
            news += round.followed.wait()
        if round.moments is not None:
            moments, found = round.moments.wait(), self.moments.found()
            chosen = {name: found[name] for name in moments.names}
            news += moments.views
        if news:
            land(self._extras(chosen), news, round.sent)
        self.moments.reset()

    def _extras(self, moments: Mapping[str, Tensor]) -> list[Tensor]:
        """Buffers averaged, buffers followed, moments averaged."""
        return [*self.buffers.averaged().values(), *self.buffers.followed().values(), *moments.values()]
