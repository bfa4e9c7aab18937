"""The messages of parts other than exchanges: recorded step by step until they repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.plan.recording import Beside, Computed, Event, Repeated, Sent, Waited

_LONGEST = 256  # steps of the longest period that is recognised


@dataclass(frozen=True)
class PeriodicTrace:
    """The recorded steps; the last `rhythm` of them repeat for ever."""

    steps: tuple[tuple[Event, ...], ...]
    reports: tuple[int, ...]  # made by each step
    rhythm: int
    sent_at: dict[int, tuple[int, int]]  # for each message, the step that sent it and its place there

    def __bool__(self) -> bool:
        return any(self.steps)

    def like(self, done: int) -> int:
        """The recorded step that stands for this one."""
        seen = len(self.steps)
        return done if done < seen else seen - self.rhythm + (done - seen) % self.rhythm

    def key(self, done: int, number: int) -> object:
        """A name for a message of this step, unique in the run."""
        step, place = self.sent_at[number]
        return ("periodic", done - (self.like(done) - step), place)

    def rounds(self, steps: int) -> int:
        """The reports made in this many steps."""
        if not self:
            return 0
        return sum(self.reports[self.like(done)] for done in range(steps))


def periodic(steps: Sequence[Sequence[Event]], reports: Sequence[int]) -> PeriodicTrace:
    """Find the period of the recorded steps."""
    sent_at: dict[int, tuple[int, int]] = {}
    for step, events in enumerate(steps):
        for place, number in enumerate(_numbers(events)):
            sent_at[number] = (step, place)
    # Waits for messages sent before the first step are dropped.
    known = [
        tuple(_clean(event, sent_at) for event in events if _is_known(event, sent_at)) for events in steps
    ]
    return PeriodicTrace(tuple(known), tuple(reports), _rhythm(known, sent_at), sent_at)


def _numbers(events: Sequence[Event]) -> list[int]:
    """The numbers of messages and jobs that begin here."""
    found = []
    for event in events:
        if isinstance(event, Sent):
            found.append(event.number)
        elif isinstance(event, Beside):
            found += [*_numbers(event.events), event.number]
    return found


def _is_known(event: Event, sent_at: dict[int, tuple[int, int]]) -> bool:
    return event.number in sent_at if isinstance(event, Waited) else not isinstance(event, Computed)


def _clean(event: Event, sent_at: dict[int, tuple[int, int]]) -> Event:
    if isinstance(event, Beside):
        inside = tuple(_clean(inner, sent_at) for inner in event.events if _is_known(inner, sent_at))
        return Beside(event.number, event.task_queue, inside)
    return event


def _rhythm(steps: Sequence[tuple[Event, ...]], sent_at: dict[int, tuple[int, int]]) -> int:
    """The shortest period of the last steps."""
    looks = [_look(events, step, sent_at) for step, events in enumerate(steps)]
    for length in range(1, min(_LONGEST, len(looks) // 2) + 1):
        if looks[-length:] == looks[-2 * length : -length]:
            return length
    return 1


def _look(events: Sequence[Event], step: int, sent_at: dict[int, tuple[int, int]]) -> tuple[object, ...]:
    """The events without message numbers, which never repeat."""
    looks: list[object] = []
    for event in events:
        if isinstance(event, Sent):
            looks.append((event.kind, event.size, event.given, event.control))
        elif isinstance(event, Waited):
            sent, place = sent_at[event.number]
            looks.append((step - sent, place))
        elif isinstance(event, Beside):
            looks.append((event.task_queue, _look(event.events, step, sent_at)))
        elif isinstance(event, Repeated):
            looks.append((event.times, _look(event.events, step, sent_at)))
    return tuple(looks)
