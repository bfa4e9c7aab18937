"""Run the clocks through a whole run if it is short, otherwise through windows spread over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import torch
from torch import Tensor

from offbeat.engine.exchange import Exchange
from offbeat.plan.groups import Groups, alike, groups_at
from offbeat.plan.job import Cluster, Job
from offbeat.plan.probe import Seen, Trace
from offbeat.plan.replay import Clocks, Costs
from offbeat.plan.unroll import Act, Timeline
from offbeat.simulate import Network

_SECONDS = 1.0  # about how long planning one method may take
_WINDOWS = 12


@dataclass
class Spent:
    """Seconds on each network: the mean over runs, the variance, and where they go."""

    mean: Tensor
    variance: Tensor
    computed: Tensor
    skewed: Tensor
    exposed: Tensor
    flown: Tensor

    def add(self, other: Spent, *, computing: float, rounds: float) -> None:
        """Add several windows like this one, independent of each other: for gradients, and for rounds."""
        self.mean += computing * other.computed + rounds * (other.mean - other.computed)
        self.computed += computing * other.computed
        for name in ("variance", "skewed", "exposed", "flown"):
            getattr(self, name).add_(getattr(other, name), alpha=rounds)


@dataclass(frozen=True)
class Moment:
    """What happens after a gradient."""

    done: int
    acts: tuple[Act, ...]


class Forecast:
    """One method on one cluster, for several networks at once."""

    def __init__(
        self, seen: Seen, course: Timeline, job: Job, cluster: Cluster, networks: Sequence[Network]
    ) -> None:
        self._seen, self._course, self._job, self._cluster = seen, course, job, cluster
        self._networks, self._costs = list(networks), Costs(networks, alike=not cluster.compute.spread)
        self._groups: dict[tuple[int, int], Groups] = {}
        self._world = Groups(cluster.workers)
        self._steps = [0, *course.iterations]  # completed before each gradient
        due = {done: tuple(acts) for done, acts in groupby(course.acts, key=lambda a: a.done)}
        # Parts other than exchanges act at every step.
        self._constant = bool(seen.periodic or seen.waitfree_parts)
        when = range(1, job.steps + 1) if self._constant else due
        self._moments = [Moment(done, due.get(done, ())) for done in when]

    def spent(self) -> Spent:
        """Of the whole run, including its start and end."""
        moments, steps = self._moments, self._job.steps
        if not moments or self._price(len(moments), steps) <= 2 * _SECONDS:
            return self._whole()
        affordable = max(6, int(len(moments) * _SECONDS / self._price(len(moments), steps)))
        count = min(_WINDOWS, affordable // 2, len(moments))
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
        """Roughly the seconds it takes to go through this many moments."""
        width = self._cluster.workers if self._cluster.compute.spread else 1
        each = sum(len(m.acts) for m in self._moments) / max(1, len(self._moments)) + 4 * self._constant
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
        """Of the start and the end alone."""
        clocks = self._clocks(1)
        self._do("start", self._seen.start, clocks)
        self._finish(clocks)
        return _spent(clocks)

    def _window(self, first: int, last: int) -> Spent:
        """Of these moments. A few before them let workers drift apart and put messages into the air."""
        clocks = self._clocks(self.runs)
        self._go(clocks, max(0, first - self._lead), first)
        clocks.start_here()
        self._go(clocks, first, last)
        return _spent(clocks)

    @cached_property
    def _lead(self) -> int:
        """How many moments to go through before a window counts."""
        exchanges = [part for part in self._seen.sync.parts if isinstance(part, Exchange)]
        apart = self._constant or any(
            part.delay or part.peers.at(0).size < self._cluster.workers for part in exchanges
        )
        return 4 if apart else 0

    def _clocks(self, runs: int) -> Clocks:
        return Clocks(self._networks, self._cluster.compute, self._cluster.workers, runs)

    def _go(self, clocks: Clocks, first: int, last: int) -> int:
        """Go through these moments; return the number of gradients done."""
        done = self._moments[first - 1].done if first else 0
        for moment in self._moments[first:last]:
            clocks.compute(self._steps[done : moment.done])
            before, done = done, moment.done
            for waitfree in self._seen.waitfree_parts:
                clocks.waitfree(waitfree, done - 1, self._costs)
            if self._seen.periodic:
                self._repeat(done - 1, clocks)
            for act in moment.acts:
                self._act(act, clocks)
            clocks.mark((moment.done - before, *((act.place, act.what) for act in moment.acts)))
        return done

    def _repeat(self, step: int, clocks: Clocks) -> None:
        """Let parts other than exchanges do their step."""
        periodic = self._seen.periodic
        acts = Trace(periodic.steps[periodic.like(step)], self._seen.sizes)
        clocks.act(acts, self._world, lambda number: periodic.key(step, number), self._costs)

    def _act(self, act: Act, clocks: Clocks) -> None:
        acts = getattr(self._seen.rounds[act.place], act.what)
        clocks.act(acts, self.among(act), lambda number: (act.place, act.round, number), self._costs)

    def _do(self, name: str, acts: Trace, clocks: Clocks) -> None:
        clocks.act(acts, self._world, lambda number: (name, number), self._costs)

    def _finish(self, clocks: Clocks) -> None:
        self._do("meet", self._seen.meet, clocks)
        for act in self._course.flush:
            self._act(act, clocks)
        clocks.wait_all()
        self._do("last", self.closing(), clocks)

    def among(self, act: Act) -> Groups:
        """The groups in which an exchange acts."""
        key = (act.place, alike(act.round))
        if key not in self._groups:
            found = groups_at(self._seen.sync.parts[act.place], alike(act.round), self._cluster.workers)
            self._groups[key] = self._world if found.members is None else found
        return self._groups[key]

    def closing(self) -> Trace:
        """The last messages of finish()."""
        return self._seen.equal if self._equal_at_the_end() else self._seen.last

    def _equal_at_the_end(self) -> bool:
        """Whether finish() finds all workers with the same weights."""
        end = self._course.iterations[-1]
        begun = {(a.place, a.round) for a in self._course.acts if a.what == "begin" and a.iteration == end}
        for act in [*self._course.acts, *self._course.flush]:
            part, equality = self._seen.sync.parts[act.place], self._seen.rounds[act.place].equality
            assert isinstance(part, Exchange)
            if act.what != "land" or part.live.only is not None or self.among(act).members is not None:
                continue
            at_once = (act.place, act.round) in begun and act.iteration == end and not part.delay
            # Shared gradients keep workers equal only if every step has shared them.
            always = not part.live.early or self._course.rounds[act.place] == end
            if equality.after_flush or (at_once and always and equality.after_round):
                return True
        return False


def _spent(clocks: Clocks) -> Spent:
    ends = clocks.latest - clocks.origin
    variance = torch.zeros_like(ends[:, 0])
    if ends.shape[1] > 1:
        variance = ends.var(1)
    elif clocks.luck:  # with one run, moments of the same kind are the sample
        for paces in clocks.paces.values():
            if len(paces) > 1:
                variance += torch.stack(paces).var(0)[:, 0] * len(paces)
    parts = (clocks.computed, clocks.skewed, clocks.exposed, clocks.flown)
    return Spent(ends.mean(1), variance, *(part.mean(1) for part in parts))
