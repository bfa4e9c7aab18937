"""Scales the messages of small models and few workers up to the real model and all workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offbeat.plan.recording import Event, Events, Name, QueuedJob, Repeated, Sent, Size, Waited

Key = str | tuple[int, str]  # of a trace: a moment of the run, or the place of an exchange and what it does
Worlds = Sequence[tuple[int, int]]  # the number of workers and the width of the model of each recording
_LONGEST_BLOCK = 64  # events that repeat within a step
_LONGEST_PERIOD = 256  # steps


class Differ(Exception):
    """Recordings do not consist of the same kinds of events."""


def combine(worlds: Worlds, recordings: Sequence[Sequence[Event]], width: float, workers: int) -> Events:
    """Return the events for a model of this width and this number of workers, from one recording per world.
    A layer's bytes are at most quadratic in the width. The turns of a ring grow with the workers."""
    kinds = [[(type(e), e.kind if isinstance(e, Sent) else "") for e in events] for events in recordings]
    if any(other != kinds[0] for other in kinds):
        raise Differ
    combined: list[Event] = []
    for events in zip(*recordings, strict=True):
        event, last = events[0], events[-1]
        if isinstance(event, Sent):
            event = replace(event, given=_fit(worlds, events, width))
        elif isinstance(event, QueuedJob | Repeated):
            inside = [e.events for e in events if isinstance(e, QueuedJob | Repeated)]
            event = replace(event, events=combine(worlds, inside, width, workers))
        if isinstance(event, Repeated) and isinstance(last, Repeated):
            (few, _), (many, _) = worlds[0], worlds[-1]
            growth = (last.times - event.times) / (many - few)
            event = replace(event, times=event.times + round(growth * (workers - few)))
        combined.append(event)
    return tuple(combined)


def _fit(worlds: Worlds, messages: Sequence[Event], width: float) -> Size:
    """Return the size of a message in a model of this width, from a polynomial through its recorded sizes."""
    sizes: dict[int, dict[int, float]] = {}
    for (_, at), message in zip(worlds, messages, strict=True):
        assert isinstance(message, Sent)
        sizes.setdefault(message.size, {})[at] = message.given.whole
    values = dict.fromkeys(sizes, 0.0)
    for workers, points in sizes.items():
        for x, y in points.items():
            for other in points:
                y *= (width - other) / (x - other) if other != x else 1.0
            values[workers] += y
    return Size(*split_by_workers(values))


def split_by_workers(values: dict[int, float]) -> tuple[float, float]:
    """Return a and b such that a + b / workers has these one or two values at these numbers of workers."""
    (few, at_few), *rest = values.items()
    if not rest:
        return at_few, 0.0
    many, at_many = rest[0]
    cut = (at_few - at_many) / (1 / few - 1 / many)
    return at_few - cut / few, cut


def join_pieces(traces: Mapping[Key, Sequence[Event]]) -> dict[Key, Sequence[Event]]:
    """Join messages of the same kind that are sent right after each other. Codes cut a long payload into
    pieces, whose number is not a polynomial in the width."""
    pieces = set[Name]()  # all but the first of a message, whose wait stands for all
    joined = dict[Key, Sequence[Event]]()
    for key, events in traces.items():
        joined[key] = kept = list[Event]()
        for event in events:
            last = kept[-1] if kept else None
            if isinstance(event, Sent) and isinstance(last, Sent):
                if replace(event, name=last.name, given=last.given) == last:
                    pieces.add(event.name)
                    kept[-1] = replace(last, given=Size(last.given.whole + event.given.whole))
                    continue
            if not (isinstance(event, Waited) and event.name in pieces):
                kept.append(event)
    return joined


def fold(events: Sequence[Event]) -> Events:
    """Replace the turns of a ring by one `Repeated` event. A worker that waits for a message and at once
    sends one like it passes it on. All messages of such a chain get the name of the first."""
    heads: dict[Name, Sent] = {}  # the first message of the chain that each message belongs to
    renamed: list[Event] = []
    for event in events:
        if isinstance(event, QueuedJob):
            event = replace(event, events=fold(event.events))
        elif isinstance(event, Waited) and event.name in heads:
            event = Waited(heads[event.name].name)
        elif isinstance(event, Sent):
            before = renamed[-1] if renamed else None
            head = heads.get(before.name, event) if isinstance(before, Waited) else event
            head = head if replace(event, name=head.name) == head else event
            heads[event.name] = event = head
        renamed.append(event)
    folded, start = list[Event](), 0
    while start < len(renamed):  # fold every block that is repeated at once, beginning with the shortest
        for length in range(2, min(_LONGEST_BLOCK, (len(renamed) - start) // 2) + 1):
            block, times = renamed[start : start + length], 1
            while renamed[start + times * length : start + (times + 1) * length] == block:
                times += 1
            if times > 1:
                folded.append(Repeated(times, tuple(block)))
                start += times * length
                break
        else:
            folded.append(renamed[start])
            start += 1
    return tuple(folded)


@dataclass(frozen=True)
class PeriodicTrace:
    """Recorded steps. The last `period` of them repeat for ever; the two before the gap repeat to fill it."""

    steps: tuple[Events, ...]
    reports: tuple[int, ...]  # made by each step
    gap: tuple[int, int]  # the step after which steps were not recorded, and their number
    period: int

    def __bool__(self) -> bool:
        return any(self.steps)

    def like(self, step: int) -> int:
        """Return the recorded step that stands for this one."""
        start, skipped = self.gap
        if step >= start:
            step = max(step - skipped, start - 2 + (step - start) % 2)
        seen = len(self.steps)
        return step if step < seen else seen - self.period + (step - seen) % self.period

    def count(self, steps: int) -> Counter[int]:
        """Count how often each recorded step happens in this number of steps."""
        return Counter(map(self.like, range(steps if self else 0)))


def find_period(steps: Sequence[Events], reports: Sequence[int], gap: tuple[int, int]) -> PeriodicTrace:
    """Name messages by how many steps ago they were sent, so that steps that do the same are equal."""
    known = tuple(_relate(events, step) for step, events in enumerate(steps, start=1))
    periods = range(1, min(_LONGEST_PERIOD, len(known) // 2) + 1)
    period = next((n for n in periods if known[-n:] == known[-2 * n : -n]), 1)
    return PeriodicTrace(known, tuple(reports), gap, period)


def _relate(events: Events, step: int) -> Events:
    related: list[Event] = []
    for event in events:
        if isinstance(event, QueuedJob | Repeated):
            event = replace(event, events=_relate(event.events, step))
        if not isinstance(event, Repeated):
            event = replace(event, name=(step - event.name[0], event.name[1]))
        related.append(event)
    return tuple(related)
