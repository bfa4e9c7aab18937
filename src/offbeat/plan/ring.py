"""Messages that pass round a ring: as many as there are workers, so their number is derived, not observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offbeat.plan.recording import Beside, Event, Repeated, Sent, Waited

_LONGEST = 64  # events in a block that repeats


def fold(events: Sequence[Event]) -> tuple[Event, ...]:
    """Replace the turns of a ring by one `Repeated` event.

    A worker that waits for a message and at once sends one like it passes the message on. All messages of
    such a chain get the number of the first, so that every turn looks the same.
    """
    first: dict[int, int] = {}  # the first message of the chain that each message belongs to
    last: dict[int, Sent] = {}  # the latest message of each chain
    renamed: list[Event] = []
    for event in events:
        if isinstance(event, Beside):
            event = replace(event, events=fold(event.events))
        elif isinstance(event, Waited):
            event = Waited(first.get(event.number, event.number))
        elif isinstance(event, Sent):
            before = renamed[-1] if renamed else None
            number = event.number
            if isinstance(before, Waited) and before.number in last:
                past = last[before.number]
                if (past.kind, past.size, past.given) == (event.kind, event.size, event.given):
                    number = before.number
            first[event.number] = number
            last[number] = event
            event = event if number == event.number else replace(event, number=number)
        renamed.append(event)
    return tuple(_fold_turns(renamed))


def _fold_turns(events: Sequence[Event]) -> list[Event]:
    folded: list[Event] = []
    start = 0
    while start < len(events):
        times, length = _repetition(events, start)
        block = tuple(events[start : start + length])
        folded += [Repeated(times, block)] if times > 1 else block
        start += times * length
    return folded


def _repetition(events: Sequence[Event], start: int) -> tuple[int, int]:
    """How often the shortest block that begins here is repeated, and its length."""
    for length in range(2, min(_LONGEST, (len(events) - start) // 2) + 1):
        block, times = events[start : start + length], 1
        while events[start + times * length : start + (times + 1) * length] == block:
            times += 1
        if times > 1:
            return times, length
    return 1, 1


def extrapolate(
    few: Sequence[Event], more: Sequence[Event], sizes: tuple[int, int], workers: int
) -> tuple[Event, ...]:
    """The events among `workers`, from those of two smaller worlds: repetitions grow in proportion."""
    events: list[Event] = []
    for event, other in zip(few, more, strict=True):
        if isinstance(event, Repeated) and isinstance(other, Repeated):
            growth = (other.times - event.times) / (sizes[1] - sizes[0])
            event = replace(event, times=event.times + round(growth * (workers - sizes[0])))
        elif isinstance(event, Beside) and isinstance(other, Beside):
            event = replace(event, events=extrapolate(event.events, other.events, sizes, workers))
        events.append(event)
    return tuple(events)


def pattern(events: Sequence[Event]) -> list[object]:
    """What two worlds must have in common: kinds of events and messages, not numbers or sizes."""
    return [
        (type(event), pattern(event.events))
        if isinstance(event, Beside | Repeated)
        else (type(event), event.kind if isinstance(event, Sent) else None)
        for event in events
    ]
