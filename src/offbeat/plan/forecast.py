"""The timeline of a run, the bytes that it sends, and the seconds that it takes."""

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import torch

from offbeat.base.clock import Clock
from offbeat.comm.collective import traffic
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.round import Rhythm
from offbeat.plan.groups import Groups, MessageCosts
from offbeat.plan.job import Cluster, Job
from offbeat.plan.overlap import Early, cut_round, find_buckets
from offbeat.plan.probe import MethodProfile
from offbeat.plan.recording import Events, count_sent
from offbeat.plan.replay import Clocks
from offbeat.plan.spent import Spent
from offbeat.simulate import Network
from offbeat.waitfree import CodedGradients

What = Literal["ask", "land", "advance", "begin"]
_SECONDS = 1.0  # roughly how long planning one method may take
_WINDOWS = 12


class PlannedAct(NamedTuple):
    """What an exchange does after `done` gradients. `iteration` also counts steps without a gradient."""

    done: int
    iteration: int
    late: bool  # after the local step, not before it
    place: int  # of the exchange among the parts
    order: int  # among those at the same moment
    what: What
    round: int


@dataclass(frozen=True)
class Timeline:
    """The whole run."""

    acts: list[PlannedAct]
    flush: list[PlannedAct]  # what finish() still has to land
    rounds: Counter[int]  # of each exchange
    iterations: list[int]  # completed after each gradient, those without one included


def unroll(parts: list[Part], job: Job) -> Timeline:
    """Return all rounds of all exchanges of a run."""
    iterations = _count_iterations(parts, job)
    acts, flush = list[PlannedAct](), list[PlannedAct]()
    for place, part in enumerate(parts):
        for order, (at, what, round) in enumerate(_find_acts(part, job, iterations)):
            done = bisect.bisect_left(iterations, at) + 1
            late = what != "ask" and not (isinstance(part, Exchange) and part.live.early)
            act = PlannedAct(done, at, late, place, order, what, round)
            (acts if at <= iterations[-1] else flush).append(act)
    return Timeline(sorted(acts), flush, Counter(a.place for a in acts if a.what == "begin"), iterations)


def _count_iterations(parts: list[Part], job: Job) -> list[int]:
    """Return the iterations completed after each gradient. A part may add iterations without one."""
    extra, completed, after = [part for part in parts if type(part).again is not Part.again], 0, []
    for step in range(job.steps):
        completed += 1
        while True in [part.again(Clock(completed, 0, job.rate(step))) for part in extra]:
            completed += 1
        after.append(completed)
    return after


def _find_acts(part: Part, job: Job, iterations: list[int]) -> Iterator[tuple[int, What, int]]:
    """Yield the iteration, kind and round of every act of an exchange. Those of finish() come last."""
    if not isinstance(part, Exchange):
        return
    rhythm, end, step, advanced = Rhythm(part.when, part.delay), iterations[-1], 0, False
    while step <= end:
        if rhythm.planned is None and step < end:
            if part.when.needs and rhythm.round and step == rhythm.began:
                yield step + 1, "ask", rhythm.round - 1
            rhythm.plan(Clock(step=step, round=0, lr=job.rate(bisect.bisect_right(iterations, step))))
        step = step + 1 if rhythm.planned is None else rhythm.next_act(step) or end + 1
        left: list[What] = ["land"] if rhythm.in_air else []
        for what in rhythm.acts(step) if step <= end else left:
            if what == "begin":
                rhythm.begin(step)
            elif what == "land" and part.delay and not advanced:
                yield min(step, end + 1), "advance", rhythm.round - 1  # at the latest
            advanced = what == "advance"
            yield min(step, end + 1), what, rhythm.round - 1
            if what == "land":
                rhythm.land()


def find_closing(profile: MethodProfile, timeline: Timeline) -> Events:
    """Return the last messages of finish(): a mean, unless all workers have the same weights."""
    end = timeline.iterations[-1]
    if any(isinstance(part, CodedGradients) for part in profile.sync.parts):
        return profile.traces["equal"]
    for act in [*timeline.acts, *timeline.flush]:
        part = profile.sync.parts[act.place]
        after_round, after_flush = profile.equality[act.place]
        assert isinstance(part, Exchange)
        whole = part.live.only is None and profile.groups(act.place, act.round).members is None
        if act.what == "land" and whole:
            # Shared gradients keep workers equal only if every step has shared them.
            always = not part.live.early or timeline.rounds[act.place] == end
            at_once = act.iteration == end and not part.delay
            if after_flush or (at_once and always and after_round):
                return profile.traces["equal"]
    return profile.traces["last"]


def bytes_sent(profile: MethodProfile, timeline: Timeline, last: Events) -> int:
    """Return the bytes that one worker sends, on average, in the run that ends with these messages."""
    world, steps = Groups(profile.workers), len(timeline.iterations)

    def count(events: Events, groups: Groups = world) -> float:
        total = 0.0
        for event, times in count_sent(events):
            among = world if event.everyone else groups
            sizes, counts = torch.unique(among.sizes, return_counts=True)
            for size, groups_of in zip(sizes.tolist(), counts.tolist(), strict=True):
                sent = traffic(event.kind, size, event.given.at(size))
                total += times * size * groups_of / profile.workers * sent
        return total

    total = sum(map(count, (profile.traces["start"], profile.traces["meet"], last)))
    total += sum(n * count(profile.periodic.steps[i]) for i, n in profile.periodic.count(steps).items())
    for place, size in profile.waitfree.items():
        for groups, rounds in profile.count_sidecar_rounds(place, steps).items():
            own = round(float((groups.sizes * groups.sizes).sum()) / profile.workers)  # mean group size
            total += rounds * traffic("mean", own, size.at(own))
    acts = [*timeline.acts, *timeline.flush]
    often = Counter((act.place, act.what, profile.groups(act.place, act.round)) for act in acts)
    total += sum(n * count(profile.traces[place, what], groups) for (place, what, groups), n in often.items())
    return round(total)


class Forecast:
    """The seconds of one method on one cluster, for several networks at once."""

    def __init__(
        self,
        profile: MethodProfile,
        timeline: Timeline,
        job: Job,
        cluster: Cluster,
        networks: Sequence[Network],
    ) -> None:
        self._profile, self._timeline, self._job, self._cluster = profile, timeline, job, cluster
        self.closing = find_closing(profile, timeline)
        luck = cluster.compute.spread
        self._costs, self._world = MessageCosts(networks, alike=not luck), Groups(cluster.workers)
        self._runs = int(min(32, max(1, 4e5 / len(networks) / cluster.workers))) if luck else 1
        self._steps = [0, *timeline.iterations]  # completed before each gradient
        self._early = self._find_early()
        due = {done: tuple(acts) for done, acts in groupby(timeline.acts, key=lambda act: act.done)}
        self._constant = bool(profile.periodic or profile.waitfree)  # such parts act at every step
        when = range(1, job.steps + 1) if self._constant else due
        self._moments = [(done, due.get(done, ())) for done in when]  # gradients done, and what happens then
        self._windows = dict[object, Spent]()

    def spent(self) -> Spent:
        """Return the seconds of the whole run, including its start and end."""
        moments, steps, price = self._moments, self._job.steps, self._price()
        if price <= 2 * _SECONDS:
            clocks = self._start(self._runs)
            clocks.mark("start")
            clocks.compute(self._steps[self._go_all(clocks) : steps])
            return self._finish(clocks)
        affordable = max(6, int(len(moments) * _SECONDS / price))
        count = min(_WINDOWS, affordable // 2, len(moments))
        per_window = min(affordable // count, len(moments) // count)
        edges = [round(i * len(moments) / count) for i in range(count + 1)]
        total, before = self._finish(self._start(1)), 0
        for start, end in pairwise(edges):
            first = max(start, min((start + end - per_window) // 2, end - per_window))
            last = min(end, first + per_window)
            after = steps if end == len(moments) else moments[end - 1][0]
            looked = moments[last - 1][0] - (moments[first - 1][0] if first else 0)
            window = self._window(first, last)
            total.add(window, computing=(after - before) / looked, rounds=(end - start) / (last - first))
            before = after
        return total

    def _go_all(self, clocks: Clocks) -> int:
        """Go through all moments. Where steps only repeat a period, stop once nothing changes any more."""
        trace, end, done = self._profile.periodic, len(self._moments), 0
        if trace and not (self._cluster.compute.spread or self._timeline.acts or self._profile.waitfree):
            done = self._go(clocks, 0, min(end, len(trace.steps) + trace.gap[1]))
            before = clocks.note(done)
            while done + trace.period <= end:
                done = self._go(clocks, done, done + trace.period)
                now, left = clocks.note(done), (end - done) // trace.period
                if now.repeats(before):
                    clocks.repeat(before, trace.period, left)
                    done += left * trace.period
                    break
                before = now
        return self._go(clocks, done, end)

    def _price(self) -> float:
        """Return roughly how many seconds it takes to go through all moments."""
        if not self._moments:
            return 0.0
        luck = self._cluster.compute.spread
        rows = self._runs * (self._cluster.workers if luck else 1)
        each = len(self._timeline.acts) / len(self._moments) + 4 * self._constant
        each += sum(len(early.buckets) for early in self._early.values())
        draws, clocks = rows * self._job.steps * 2e-8 if luck else 0.0, len(self._costs.networks) * rows
        return len(self._moments) * each * 12 * (4e-6 + clocks * 1.5e-9) + draws

    def _window(self, first: int, last: int) -> Spent:
        """Return the seconds of these moments, after a few that let workers drift apart."""
        parts = [(i, part) for i, part in enumerate(self._profile.sync.parts) if isinstance(part, Exchange)]
        drift = any(part.delay or self._profile.groups(i, 0).members is not None for i, part in parts)
        start = max(0, first - 4) if drift or self._constant else first
        key = self._describe(start, first, last)
        if key is None or key not in self._windows:
            clocks = Clocks(self._costs, self._cluster, self._runs)
            self._go(clocks, start, first)
            clocks.start_here()
            self._go(clocks, first, last)
            self._windows[key] = clocks.spent()
        return self._windows[key]

    def _describe(self, start: int, first: int, last: int) -> object:
        """Return what the seconds of a window depend on. None: on luck, or on more than its exchanges."""
        if self._constant or self._cluster.compute.spread:
            return None
        key, rounds = list[object]([first - start]), dict[int, int]()
        before = self._moments[start - 1][0] if start else 0
        for done, acts in self._moments[start:last]:
            key.append(done - before)
            before = done
            for act in acts:
                since = act.round - rounds.setdefault(act.place, act.round)
                among = self._profile.groups(act.place, act.round)
                own = among.members is not None and among
                key.append((act.place, act.what, since, own, self._leaves_early(act)))
        return tuple(key)

    def _start(self, runs: int) -> Clocks:
        clocks = Clocks(self._costs, self._cluster, runs)
        clocks.act(self._profile.traces["start"], self._world, "start")
        return clocks

    def _go(self, clocks: Clocks, first: int, last: int) -> int:
        """Go through these moments. Return the number of gradients done."""
        profile, done = self._profile, self._moments[first - 1][0] if first else 0
        for after, acts in self._moments[first:last]:
            clocks.compute(self._steps[done:after])
            before, done = done, after
            for place in profile.waitfree:
                clocks.run_sidecars(profile, place, done - 1)
            if profile.periodic:
                events = profile.periodic.steps[profile.periodic.like(done - 1)]
                clocks.act(events, self._world, "periodic", done - 1)
            for act in acts:
                self._act(clocks, act)
            clocks.mark((done - before, *((act.place, act.what) for act in acts)))
        return done

    def _find_early(self) -> dict[int, Early]:
        """Return rounds whose gradients are sent during the backward pass, by the place of the exchange."""
        found, traces = {}, self._profile.traces
        for place, part in enumerate(self._profile.sync.parts):
            if buckets := find_buckets(part, self._job):
                found[place] = cut_round(part, buckets, traces[place, "begin"], traces[place, "land"])
        return found

    def _leaves_early(self, act: PlannedAct) -> bool:
        """Whether its gradients are sent early: not in the first round, and only if the round is certain."""
        part = self._profile.sync.parts[act.place]
        certain = isinstance(part, Exchange) and Rhythm(part.when, 0).is_certain(act.iteration)
        return act.place in self._early and act.round > 0 and certain

    def _act(self, clocks: Clocks, act: PlannedAct) -> None:
        groups = self._profile.groups(act.place, act.round)
        if self._leaves_early(act):
            if act.what == "begin":
                clocks.act_early(self._early[act.place], groups, act.place, act.round)
            if act.what in ("begin", "land"):
                return
        clocks.act(self._profile.traces[act.place, act.what], groups, act.place, act.round)

    def _finish(self, clocks: Clocks) -> Spent:
        clocks.act(self._profile.traces["meet"], self._world, "meet")
        for act in self._timeline.flush:
            self._act(clocks, act)
        clocks.wait_all()
        clocks.act(self.closing, self._world, "last")
        return clocks.spent()
