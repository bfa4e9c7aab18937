"""What an exchange sends when a round begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.base.tensors import Share
from offbeat.comm.communicator import arrived
from offbeat.engine.round import Round
from offbeat.reduce.rounded import send as send_mean

if TYPE_CHECKING:
    from offbeat.engine.exchange import Exchange


def send(part: Exchange, round: Round, share: Share | None) -> None:
    """Send this worker's share of a round: the live tensors, unless it was taken earlier."""
    payload, sender, states = part.payload, part.sender, part._states
    with round.phase("offbeat.begin"):
        moments, digest = payload.moments.collect(round.clock.step)
        weight, flags = part.tally.word(part.arrival.judge(states, part.tally.made))
        weight = sender.check_unchanged(round, weight) if sender.parts else weight
        place = (part.index, part._rates_digest, part._everyone.rank)
        heads = round.compare(*place, digest, weight, part.totals.seconds_waited, flags)
        factor = round.weigh(heads, weight, flags)
        part.tally.restart()
        round.mean = arrived(payload.packed)
        if round.void:
            return
        moments = payload.moments.choose(moments, heads, round)
        notes, live = share or (part.live.notes(), part.live.tensors())
        if len(payload.packed.names) > len(live):
            payload.pack_extras(notes)
        if part.arrival.plain and factor == 1 and not sender.parts and payload.packed.names:
            round.mean = send_mean(payload.packed, round.comm, live)
        elif payload.packed.names:  # otherwise it is a round of moments alone
            round.mean = sender.start(round, (notes, live), factor, heads, states)
        round.messages.append(round.mean)
        if payload.has_extras:
            payload.send_extras(moments, round, factor, late=part.delay != 0)
