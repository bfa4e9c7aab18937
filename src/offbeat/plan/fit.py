"""The bytes of the real model's messages, from those of small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.plan.recording import Event, sent_in


@dataclass(frozen=True)
class Size:
    """Bytes of a message: some whatever the number of workers, some cut among them."""

    whole: float
    cut: float = 0.0

    def at(self, workers: int) -> float:
        return max(0.0, self.whole + self.cut / workers)


def message_sizes(told: Sequence[tuple[int, Sequence[Event]]], width: float) -> dict[int, Size]:
    """Of each message of the first, in a model of this width; `told` are widths and what was sent at each.

    A layer's bytes are quadratic in the width (a mean sends all of it, a code of low rank its edges), so the
    parabola through three widths tells those of any.
    """
    sent = [(at, sent_in(events)) for at, events in told]
    first = sent[0][1]
    assert all([e.kind for e in events] == [e.kind for e in first] for _, events in sent)
    sizes = {}
    for place, event in enumerate(first):
        worlds: dict[int, dict[int, float]] = {}
        for at, events in sent:
            worlds.setdefault(events[place].size, {})[at] = float(events[place].given)
        sizes[event.number] = _by_workers({size: _parabola(points, width) for size, points in worlds.items()})
    return sizes


def _parabola(points: dict[int, float], at: float) -> float:
    """The value at a place of the lowest polynomial through the points."""
    total = 0.0
    for x, y in points.items():
        for other in points:
            if other != x:
                y *= (at - other) / (x - other)
        total += y
    return total


def _by_workers(found: dict[int, float]) -> Size:
    (few, at_few), *rest = found.items()
    if not rest:
        return Size(at_few)
    many, at_many = rest[0]
    cut = (at_few - at_many) / (1 / few - 1 / many)
    return Size(at_few - cut / few, cut)
