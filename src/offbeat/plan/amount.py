"""The bytes that a worker sends in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from offbeat.comm.collective import traffic
from offbeat.plan.groups import Groups, alike
from offbeat.plan.probe import Seen, Trace
from offbeat.plan.recording import Beside, Event, Repeated, Sent
from offbeat.plan.unroll import Act, Timeline
from offbeat.plan.waitfree_model import WaitfreeModel


class Amount:
    """The bytes of one method, from its recorded messages and its timeline."""

    def __init__(
        self, seen: Seen, course: Timeline, closing: Trace, workers: int, among: Callable[[Act], Groups]
    ) -> None:
        self._seen, self._course, self._closing, self._among = seen, course, closing, among
        self._steps, self._world = len(course.iterations), Groups(workers)

    def bytes_sent(self) -> int:
        """Sent by one worker, on average, in the whole run."""
        total = sum(
            self._bytes(acts, self._world) for acts in (self._seen.start, self._seen.meet, self._closing)
        )
        counted: dict[tuple[int, str, int], int] = {}
        total += self._periodic() + sum(self._waitfree(waitfree) for waitfree in self._seen.waitfree_parts)
        acts = [*self._course.acts, *self._course.flush]
        for act in acts:
            key = (act.place, act.what, alike(act.round))
            counted[key] = counted.get(key, 0) + 1
        known: dict[tuple[int, str, int], float] = {}
        for act in acts:
            key = (act.place, act.what, alike(act.round))
            if key not in known:
                known[key] = self._bytes(getattr(self._seen.rounds[act.place], act.what), self._among(act))
        return round(total + sum(known[key] * count for key, count in counted.items()))

    def _waitfree(self, waitfree: WaitfreeModel) -> float:
        total = 0.0
        for step in range(self._steps):
            if waitfree.held(step):
                sizes = waitfree.among(step).sizes
                size = round(float((sizes * sizes).sum()) / self._world.workers)  # of a worker's group
                total += traffic("mean", size, round(waitfree.size.at(size)))
        return total

    def _periodic(self) -> float:
        periodic = self._seen.periodic
        often = Counter(periodic.like(step) for step in range(self._steps)) if periodic else Counter()
        return sum(
            count * self._bytes(Trace(periodic.steps[step], self._seen.sizes), self._world)
            for step, count in often.items()
        )

    def _bytes(self, acts: Trace, groups: Groups) -> float:
        total = 0.0
        for event, times in _count_sent(acts.events):
            among = self._world if event.everyone else groups
            sizes, counts = torch.unique(among.sizes, return_counts=True)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
                given = round(acts.sizes[event.number].at(size))
                total += times * size * count / among.workers * traffic(event.kind, size, given)
        return total


def _count_sent(events: Sequence[Event]) -> list[tuple[Sent, int]]:
    """All messages, including those of task queues, and how often each is sent."""
    found = []
    for event in events:
        if isinstance(event, Sent):
            found.append((event, 1))
        elif isinstance(event, Beside):
            found += _count_sent(event.events)
        elif isinstance(event, Repeated):
            found += [(sent, times * event.times) for sent, times in _count_sent(event.events)]
    return found
