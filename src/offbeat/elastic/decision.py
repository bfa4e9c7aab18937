"""Who takes part in the next round: worked out from what all workers have told, the same everywhere."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from offbeat.base.errors import Disagreement, RunFinished
from offbeat.comm.changing import Card, Members

FINISHED = "The others have finished the run: take its weights from them, or start a new run on all workers."


@dataclass(frozen=True)
class Seat:
    """One worker that has asked for members: its name, its card, and where it can be reached."""

    name: str
    card: Card
    address: str  # of its store
    attempt: int = 0  # how often it has asked
    key: str = ""  # of its connections, if they still work
    size: int = 1  # how many workers these connect


@dataclass(frozen=True)
class Decision:
    """The members of the next round, who heals whom, and the store through which they connect."""

    members: Members
    host: str
    addresses: tuple[str, ...]  # of the stores of all members, in the order of ranks
    donors: dict[str, str]  # by the name of the worker that receives the state
    keeps: bool  # the connections of the last round


def decide(seats: Sequence[Seat], me: str) -> Decision:
    """Decide for all workers that have asked. Raises if this one has another method or model.

    The lineage with the most rounds counts, that of the most workers if several have as many. A worker that
    has prepared a round commits it if another one has. Workers of another lineage, or of none, receive the
    state if the others are where they can give it, and wait otherwise. So do workers that are further ahead.
    """
    seats = sorted(of_one_method(seats, me), key=lambda seat: seat.name)
    committed = {seat.card.lineage for seat in seats}
    lineages = {seat.name: _lineage(seat.card, committed) for seat in seats}
    often = Counter(lineages.values())
    rounds, _, lineage = max((r, often[r, of], of) for r, of in lineages.values())
    starts = rounds < 0
    current = [seat for seat in seats if lineages[seat.name] == (rounds, lineage)]
    first = min(seat.card.place for seat in current)
    joining, partial = [seat for seat in seats if seat not in current], False
    if first < inf or not all(seat.card.open for seat in current):
        partial = any(seat.card.place > first for seat in current)
        current, joining = [seat for seat in current if seat.card.place == first], []
    members = sorted([*current, *joining], key=lambda seat: seat.name)
    donors = {seat.name: current[i % len(current)].name for i, seat in enumerate(joining)}
    names = tuple(seat.name for seat in members)
    keys = {seat.key for seat in members}
    # If one of those that are connected is missing here, the others would wait for it in the round.
    keeps = len(keys) == 1 and "" not in keys and not joining and members[0].size == len(members)
    attempts = json.dumps([(seat.name, seat.attempt) for seat in members])
    key = keys.pop() if keeps else hashlib.sha256(attempts.encode()).hexdigest()[:16]
    # One more than those who began this lineage: a worker that joins before the first commit is younger.
    entered = tuple(rounds + 1 if seat in joining else seat.card.entered for seat in members)
    found = Members(names, key, lineage, starts=starts, partial=partial, entered=entered)
    addresses = tuple(seat.address for seat in members)
    return Decision(found, current[0].address, addresses, donors, keeps)


def drop_finished(seats: Sequence[Seat], me: str) -> list[Seat]:
    """Return the workers whose run goes on. Raises if one with the method of this worker has finished it."""
    mine = next((seat.card for seat in seats if seat.name == me), None)
    if mine is not None and any(seat.card.over and seat.card.method == mine.method for seat in seats):
        raise RunFinished(FINISHED)
    return [seat for seat in seats if not seat.card.over]


def _lineage(card: Card, committed: set[str]) -> tuple[int, str]:
    """The rounds and the lineage of a worker, once it has committed what another one has committed."""
    if card.prepared and card.prepared in committed:
        return card.rounds + 1, card.prepared
    return card.rounds, card.lineage


def of_one_method(seats: Sequence[Seat], me: str) -> list[Seat]:
    """Those with the method of the run: of the worker that is furthest, or of most workers.

    Raises if this one has another method or model.
    """
    often = Counter(seat.card.method for seat in seats)
    first = min(seats, key=lambda seat: (-seat.card.rounds, -often[seat.card.method], seat.name))
    mine = next(seat.card for seat in seats if seat.name == me)
    if mine.method != first.card.method:
        what = f"the method {mine.call}, the run has {first.card.call}"
        if mine.call == first.card.call:
            what = f"the method of the run, {mine.call}, but another model"
        raise Disagreement(
            f"This worker has {what}: build the same model and method as the others, or name another "
            "lighthouse."
        )
    return [seat for seat in seats if seat.card.method == first.card.method]
