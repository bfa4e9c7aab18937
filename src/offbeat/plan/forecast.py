"""The clocks of a whole run: in full where it is short, otherwise in windows spread over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from offbeat.comm import traffic
from offbeat.plan.groups import Groups, alike, groups_at
from offbeat.plan.imagined import sent_in
from offbeat.plan.job import Cluster, Job
from offbeat.plan.probe import Acts, Seen
from offbeat.plan.replay import Clocks, Costs
from offbeat.plan.rush import Rush
from offbeat.plan.unroll import Act, Course
from offbeat.simulate import Network

_SECONDS = 1.0  # about what one method may take to plan
_WINDOWS = 12
_NOTHING = Acts((), {})


@dataclass
class Spent:
    """Seconds, for each network: the mean over runs, its variance, and where they went."""

    mean: Tensor
    variance: Tensor
    computed: Tensor
    skewed: Tensor
    exposed: Tensor
    flown: Tensor

    def add(self, other: Spent, *, computing: float, rounds: float) -> None:
        """So many stretches like another, each with luck of its own: as to gradients, and as to the rest."""
        self.mean += computing * other.computed + rounds * (other.mean - other.computed)
        self.computed += computing * other.computed
        for name in ("variance", "skewed", "exposed", "flown"):
            getattr(self, name).add_(getattr(other, name), alpha=rounds)


@dataclass(frozen=True)
class Moment:
    """The gradient after which something happens, and what."""

    done: int
    acts: tuple[Act, ...]


class Forecast:
    """One method on one cluster, for several networks at once."""

    def __init__(
        self, seen: Seen, course: Course, job: Job, cluster: Cluster, networks: Sequence[Network]
    ) -> None:
        self._seen, self._course, self._job, self._cluster = seen, course, job, cluster
        self._networks, self._costs = list(networks), Costs(networks, alike=not cluster.compute.spread)
        self._groups: dict[tuple[int, int], Groups] = {}
        self._world = Groups(cluster.workers)
        self._steps = [0, *course.iterations]  # completed before each gradient
        due = {done: tuple(acts) for done, acts in groupby(course.acts, key=lambda a: a.done)}
        # Parts with a habit of their own act at every step.
        when = range(1, job.steps + 1) if seen.habit or seen.rushes else due
        self._moments = [Moment(done, due.get(done, ())) for done in when]

    def spent(self) -> Spent:
        """Of the whole run, its start and end included."""
        moments, steps = self._moments, self._job.steps
        if self._price(len(moments), steps) <= 2 * _SECONDS:
            return self._whole()
        affordable = max(6, int(len(moments) * _SECONDS / self._price(len(moments), steps)))
        count = min(_WINDOWS, affordable // 2)
        per_window = min(affordable // count, len(moments) // count)
        edges = [round(i * len(moments) / count) for i in range(count + 1)]
        total, before = self._fixed(), 0
        for start, end in pairwise(edges):
            first = max(start, min((start + end - per_window) // 2, end - per_window))
            last = min(end, first + per_window)
            after = steps if end == len(moments) else moments[end - 1].done
            looked = moments[last - 1].done - (moments[first - 1].done if first else 0)
            window = self._window(first, last)
            total.add(window, computing=(after - before) / looked, rounds=(end - start) / (last - first))
            before = after
        return total

    @property
    def runs(self) -> int:
        if not self._cluster.compute.spread:
            return 1
        return int(min(32, max(1, 4e5 / len(self._networks) / self._cluster.workers)))

    def _price(self, moments: int, steps: int) -> float:
        """Seconds that looking at all of it would take, roughly."""
        width = self._cluster.workers if self._cluster.compute.spread else 1
        each = sum(len(m.acts) for m in self._moments) / max(1, len(self._moments))
        clocks = len(self._networks) * self.runs * width
        draws = self.runs * width * steps * 2e-8 if self._cluster.compute.spread else 0.0
        return moments * each * 12 * (4e-6 + clocks * 1.5e-9) + draws

    def _whole(self) -> Spent:
        clocks = self._clocks(self.runs)
        self._do("start", self._seen.start, clocks)
        clocks.mark("start")
        done = self._go(clocks, 0, len(self._moments))
        clocks.compute(self._steps[done : self._job.steps])
        self._finish(clocks)
        return _spent(clocks)

    def _fixed(self) -> Spent:
        """The start and the end alone."""
        clocks = self._clocks(1)
        self._do("start", self._seen.start, clocks)
        self._finish(clocks)
        return _spent(clocks)

    def _window(self, first: int, last: int) -> Spent:
        """From one moment to another, beginning with all workers alike and nothing in the air."""
        clocks = self._clocks(self.runs)
        self._go(clocks, first, last)
        return _spent(clocks)

    def _clocks(self, runs: int) -> Clocks:
        return Clocks(self._networks, self._cluster.compute, self._cluster.workers, runs)

    def _go(self, clocks: Clocks, first: int, last: int) -> int:
        """Through these moments; the gradients done afterwards."""
        done = self._moments[first - 1].done if first else 0
        for moment in self._moments[first:last]:
            clocks.compute(self._steps[done : moment.done])
            before, done = done, moment.done
            for rush in self._seen.rushes:
                clocks.rush(rush, done - 1, self._costs)
            if self._seen.habit:
                self._repeat(done - 1, clocks)
            for act in moment.acts:
                self._act(act, clocks)
            clocks.mark((moment.done - before, *((act.place, act.what) for act in moment.acts)))
        return done

    def _repeat(self, step: int, clocks: Clocks) -> None:
        """What parts do that are no exchanges."""
        habit = self._seen.habit
        acts = Acts(habit.steps[habit.like(step)], self._seen.sizes)
        clocks.act(acts, self._world, lambda number: habit.key(step, number), self._costs)

    def _act(self, act: Act, clocks: Clocks) -> None:
        acts = getattr(self._seen.rounds[act.place], act.what)
        clocks.act(acts, self._of(act), lambda number: (act.place, act.round, number), self._costs)

    def _do(self, name: str, acts: Acts, clocks: Clocks) -> None:
        clocks.act(acts, self._world, lambda number: (name, number), self._costs)

    def _finish(self, clocks: Clocks) -> None:
        self._do("meet", self._seen.meet, clocks)
        for act in self._course.flush:
            self._act(act, clocks)
        clocks.settle()
        self._do("last", self._closing(), clocks)

    def _of(self, act: Act) -> Groups:
        key = (act.place, alike(act.round))
        if key not in self._groups:
            found = groups_at(self._seen.sync.parts[act.place], alike(act.round), self._cluster.workers)
            self._groups[key] = self._world if found.members is None else found
        return self._groups[key]

    def _closing(self) -> Acts:
        return _NOTHING if self._equal_at_the_end() else self._seen.last

    def _equal_at_the_end(self) -> bool:
        """Whether finish() finds all workers alike."""
        if self._seen.habit:
            return False
        end = self._course.iterations[-1]
        for place, round in self._seen.rounds.items():
            if round.shares and self._course.rounds[place] == end:
                return True
        landed = [act for act in self._course.acts if act.iteration == end and act.what == "land"]
        begun = {
            (act.place, act.round)
            for act in self._course.acts
            if act.iteration == end and act.what == "begin"
        }
        return any(self._seen.rounds[a.place].equalizes and (a.place, a.round) in begun for a in landed)

    def bytes_sent(self) -> int:
        """By one worker, on average, in the whole run."""
        total = sum(
            self._bytes(acts, self._world) for acts in (self._seen.start, self._seen.meet, self._closing())
        )
        counted: dict[tuple[int, str, int], int] = {}
        total += self._habitual() + sum(self._rushed(rush) for rush in self._seen.rushes)
        acts = [*self._course.acts, *self._course.flush]
        for act in acts:
            key = (act.place, act.what, alike(act.round))
            counted[key] = counted.get(key, 0) + 1
        known: dict[tuple[int, str, int], float] = {}
        for act in acts:
            key = (act.place, act.what, alike(act.round))
            if key not in known:
                known[key] = self._bytes(getattr(self._seen.rounds[act.place], act.what), self._of(act))
        return round(total + sum(known[key] * count for key, count in counted.items()))

    def _rushed(self, rush: Rush) -> float:
        total = 0.0
        for step in range(self._job.steps):
            if rush.held(step):
                sizes = rush.among(step).sizes
                size = round(float((sizes * sizes).sum()) / self._cluster.workers)  # of a worker's group
                total += traffic("mean", size, round(rush.size.at(size)))
        return total

    def _habitual(self) -> float:
        habit = self._seen.habit
        often = Counter(habit.like(step) for step in range(self._job.steps)) if habit else Counter()
        return sum(
            count * self._bytes(Acts(habit.steps[step], self._seen.sizes), self._world)
            for step, count in often.items()
        )

    def _bytes(self, acts: Acts, groups: Groups) -> float:
        total = 0.0
        for event in sent_in(acts.events):
            among = self._world if event.everyone else groups
            sizes, counts = torch.unique(among.sizes, return_counts=True)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
                given = round(acts.sizes[event.number].at(size))
                total += size * count / among.workers * traffic(event.kind, size, given)
        return total


def _spent(clocks: Clocks) -> Spent:
    ends = clocks.now.amax(-1)
    variance = torch.zeros_like(ends[:, 0])
    if ends.shape[1] > 1:
        variance = ends.var(1)
    elif clocks.luck:  # of one run, moments of the same kind tell
        for paces in clocks.paces.values():
            if len(paces) > 1:
                variance += torch.stack(paces).var(0)[:, 0] * len(paces)
    parts = (clocks.computed, clocks.skewed, clocks.exposed, clocks.flown)
    return Spent(ends.mean(1), variance, *(part.mean(1) for part in parts))
