"""Extrapolate the bytes of the real model's messages from those of small models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.plan.recording import Event, sent_in


@dataclass(frozen=True)
class Size:
    """Bytes of a message: a fixed part, and a part divided by the number of workers."""

    whole: float
    cut: float = 0.0

    def at(self, workers: int) -> float:
        return max(0.0, self.whole + self.cut / workers)


def message_sizes(recorded: Sequence[tuple[int, Sequence[Event]]], width: float) -> dict[int, Size]:
    """The size of each message in a model of this width, by its number in the first recording.

    `recorded` holds widths and the events at each. A layer's bytes are at most quadratic in the width (a mean
    sends the whole matrix, a low-rank code its edges), so a parabola through three widths gives any other.
    """
    sent = [(at, sent_in(events)) for at, events in recorded]
    first = sent[0][1]
    assert all([e.kind for e in events] == [e.kind for e in first] for _, events in sent)
    sizes = {}
    for place, event in enumerate(first):
        worlds: dict[int, dict[int, float]] = {}
        for at, events in sent:
            worlds.setdefault(events[place].size, {})[at] = float(events[place].given)
        sizes[event.number] = by_workers({size: _parabola(points, width) for size, points in worlds.items()})
    return sizes


def _parabola(points: dict[int, float], at: float) -> float:
    """The value there of the polynomial of lowest degree through the points."""
    total = 0.0
    for x, y in points.items():
        for other in points:
            if other != x:
                y *= (at - other) / (x - other)
        total += y
    return total


def by_workers(values: dict[int, float]) -> Size:
    """The size that has these values, one or two, at these numbers of workers."""
    (few, at_few), *rest = values.items()
    if not rest:
        return Size(at_few)
    many, at_many = rest[0]
    cut = (at_few - at_many) / (1 / few - 1 / many)
    return Size(at_few - cut / few, cut)
