"""What parts do that are no exchanges: watched step by step until they only repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.plan.recording import Beside, Event, Sent, Waited

_LONGEST = 256  # a rhythm of more steps is not recognised


@dataclass(frozen=True)
class PeriodicTrace:
    """The steps that were seen, of which the last `rhythm` are repeated for ever."""

    steps: tuple[tuple[Event, ...], ...]
    reports: tuple[int, ...]  # handed in by each step
    rhythm: int
    sent_at: dict[int, tuple[int, int]]  # for each message, the step that sent it and its place there

    def __bool__(self) -> bool:
        return any(self.steps)

    def like(self, done: int) -> int:
        """The step seen that a step is like."""
        seen = len(self.steps)
        return done if done < seen else seen - self.rhythm + (done - seen) % self.rhythm

    def key(self, done: int, number: int) -> object:
        """What a message is called in another step than the one it was seen in."""
        step, place = self.sent_at[number]
        return ("periodic", done - (self.like(done) - step), place)

    def rounds(self, steps: int) -> int:
        """Reports in so many steps."""
        if not self:
            return 0
        return sum(self.reports[self.like(done)] for done in range(steps))


def periodic(steps: Sequence[Sequence[Event]], reports: Sequence[int]) -> PeriodicTrace:
    sent_at: dict[int, tuple[int, int]] = {}
    for step, events in enumerate(steps):
        for place, number in enumerate(_numbers(events)):
            sent_at[number] = (step, place)
    # What was in the air before the first step is not waited for.
    known = [
        tuple(_kept(event, sent_at) for event in events if _is_known(event, sent_at)) for events in steps
    ]
    return PeriodicTrace(tuple(known), tuple(reports), _rhythm(known, sent_at), sent_at)


def _numbers(events: Sequence[Event]) -> list[int]:
    """Of messages and jobs that begin here."""
    found = []
    for event in events:
        if isinstance(event, Sent):
            found.append(event.number)
        elif isinstance(event, Beside):
            found += [*_numbers(event.events), event.number]
    return found


def _is_known(event: Event, sent_at: dict[int, tuple[int, int]]) -> bool:
    return isinstance(event, Sent | Beside) or (isinstance(event, Waited) and event.number in sent_at)


def _kept(event: Event, sent_at: dict[int, tuple[int, int]]) -> Event:
    if isinstance(event, Beside):
        inside = tuple(_kept(inner, sent_at) for inner in event.events if _is_known(inner, sent_at))
        return Beside(event.number, event.task_queue, inside)
    return event


def _rhythm(steps: Sequence[tuple[Event, ...]], sent_at: dict[int, tuple[int, int]]) -> int:
    """The shortest number of steps after which the last ones repeat those before."""
    looks = [_look(events, step, sent_at) for step, events in enumerate(steps)]
    for length in range(1, min(_LONGEST, len(looks) // 2) + 1):
        if looks[-length:] == looks[-2 * length : -length]:
            return length
    return 1


def _look(events: Sequence[Event], step: int, sent_at: dict[int, tuple[int, int]]) -> tuple[object, ...]:
    """The events without the numbers of their messages, which are never the same."""
    looks: list[object] = []
    for event in events:
        if isinstance(event, Sent):
            looks.append((event.kind, event.size, event.given, event.control))
        elif isinstance(event, Waited):
            sent, place = sent_at[event.number]
            looks.append((step - sent, place))
        elif isinstance(event, Beside):
            looks.append((event.task_queue, _look(event.events, step, sent_at)))
    return tuple(looks)
