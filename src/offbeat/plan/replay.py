"""Runs the clocks of all workers through a method, for many runs and many bandwidths at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.base.draws import draw_whole
from offbeat.plan.groups import Groups, MessageCosts
from offbeat.plan.job import Cluster
from offbeat.plan.overlap import Bucket, Early
from offbeat.plan.probe import MethodProfile
from offbeat.plan.recording import Events, Name, QueuedJob, Repeated, Sent, Size, Waited, count_sent
from offbeat.plan.sidecars import find_allowances, find_enough
from offbeat.plan.spent import Instant, Spent
from offbeat.waitfree import CodedGradients, EagerGradients
from offbeat.waitfree.base import Waitfree

_CHUNK = 2**15  # times drawn at once: they fit a cache
_SETTLED = 8  # turns of a ring after which all turns take equally long
_APART = 10_000_019  # steps between runs, so that no two draw the same times
Key = Callable[[Name], object]  # what names a message of this part and step


class Clocks:
    """The time of every worker: [network, run, worker], with one worker while all have the same time. Each
    worker of each run draws its own step times. `_skewed` and `_exposed` are the mean seconds of waits for
    slower workers and for messages."""

    def __init__(self, costs: MessageCosts, cluster: Cluster, runs: int) -> None:
        self._costs, self._compute, self._runs = costs, cluster.compute, runs
        self._width = cluster.workers if cluster.compute.spread else 1  # workers that never differ are one
        self._shape = (len(costs.networks), runs, self._width)
        self._now, self._free, self._sidecar = torch.zeros(3, *self._shape, dtype=torch.float64)
        self._resumed = self._now  # when they last began to compute
        self._step = torch.zeros((), dtype=torch.float64)  # how long their last step took
        self._queues, self._beside = dict[int, Tensor](), False  # times of task queues; whether one acts
        self._seconds = torch.zeros(4, *self._shape[:2], dtype=torch.float64)
        self._computed, self._skewed, self._exposed, self._flown = self._seconds
        self._world = Groups(cluster.workers)
        self._ranks = torch.arange(self._width).repeat(runs)
        self._offsets = (torch.arange(runs) * _APART).repeat_interleave(self._width)
        self._paces: dict[object, list[Tensor]] = {}  # of the last worker between moments, by kind
        self._last = self._origin = torch.zeros(self._shape[:2], dtype=torch.float64)
        self._in_flight: dict[Any, tuple[Tensor, Tensor]] = {}  # when all had sent it, when it lands
        self._known: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None = None
        self._past: list[Tensor] = []  # when the last worker had each of the last rounds of coded gradients

    def compute(self, steps: Sequence[int]) -> None:
        """Compute the gradients of these steps. The first run has the times of a simulation."""
        if not steps:
            return
        self._resumed = self._now
        if not self._compute.spread:
            self._step = torch.tensor(float(self._compute(0, 0)), dtype=torch.float64)
            seconds = float(self._step) * len(steps)
            self._now = self._now + seconds
            self._computed += seconds
            return
        drawn, rows = torch.tensor(steps), max(1, _CHUNK // len(steps))  # workers drawn together
        parts = zip(torch.split(self._ranks, rows), torch.split(self._offsets, rows), strict=True)
        each = [self._compute.seconds(rank[:, None], drawn + run[:, None]) for rank, run in parts]
        times = torch.cat([seconds.sum(-1) for seconds in each]).view(self._runs, self._width)
        self._step = torch.cat([seconds[:, -1] for seconds in each]).view(self._runs, self._width)
        self._now = self._now + times
        self._computed += times.mean(-1)

    def act(self, events: Events, groups: Groups, who: object, when: int = 0) -> None:
        """Let all workers send and wait as in this trace. `who` and `when` tell its messages from others."""
        self._go(events, groups, lambda name: (who, when - name[0], name[1]))

    def _go(self, events: Events, groups: Groups, key: Key) -> None:
        for event in events:
            if isinstance(event, Sent):
                self._send(event, self._world if event.everyone else groups, key)
            elif isinstance(event, Waited):
                self._wait(key(event.name))
            elif isinstance(event, QueuedJob):
                worker, self._beside = self._now, True
                self._now = torch.maximum(worker, self._queues.get(event.task_queue, worker))
                self._go(event.events, groups, key)
                done, self._now, self._beside = self._now, worker, False
                self._queues[event.task_queue] = done
                self._in_flight[key(event.name)] = (worker, done)
            elif isinstance(event, Repeated):
                self._repeat(event, groups, key)

    def _repeat(self, event: Repeated, groups: Groups, key: Key) -> None:
        """Go through the first turns, then extrapolate from the last of them."""
        turns = min(event.times, _SETTLED)
        for _ in range(turns - 1):
            self._go(event.events, groups, key)
        now, free, before, seconds = self._now, self._free, dict(self._in_flight), self._seconds.clone()
        self._go(event.events, groups, key)
        if rest := event.times - turns:
            self._now = self._now + rest * (self._now - now)
            self._free = self._free + rest * (self._free - free)
            self._seconds += rest * (self._seconds - seconds)
            for name in {key(sent.name) for sent, _ in count_sent(event.events)} & self._in_flight.keys():
                (ready, lands), (was_ready, landed) = self._in_flight[name], before[name]
                self._in_flight[name] = (ready + rest * (ready - was_ready), lands + rest * (lands - landed))

    def _send(self, event: Sent, groups: Groups, key: Key) -> None:
        busy, delay = self._costs.of(event.kind, event.given, groups)
        ready = self._range()[2] if groups.members is None else groups.latest(self._now)
        if not event.control:
            self._free = torch.maximum(ready, groups.latest(self._free)) + busy
        done = ready + busy if event.control else self._free
        self._in_flight[key(event.name)] = (ready, done + delay)

    def _wait(self, key: object) -> None:
        if key not in self._in_flight:
            return  # sent before the window began
        ready, lands = self._in_flight.pop(key)
        self._flown += _mean(lands - ready)
        now, some = self._now, self._width > 1  # whether any worker waits for slower ones
        if now.shape[-1] > lands.shape[-1]:
            first, mean, last = self._range()
            if bool((lands <= first).all()):
                return  # no worker waits
            if bool((ready >= last).all()):  # all wait, and leave together
                self._now = lands
                if not self._beside:
                    self._skewed += (ready - mean)[..., 0]
                    self._exposed += (lands - ready)[..., 0]
                return
            some = bool((ready > first).any())
        self._now = torch.maximum(now, lands)
        if not self._beside:
            exposed = _mean((lands - now).clamp_(min=0))
            if some:
                skewed = _mean((ready - now).clamp_(min=0))
                self._skewed += skewed
                exposed -= skewed
            self._exposed += exposed

    def act_early(self, early: Early, groups: Groups, who: object, when: int) -> None:
        """A round of gradients that leave in buckets during the step that has just been computed."""

        def key(name: Name) -> object:
            return who, when - name[0], name[1]

        done, flown = self._now, self._flown.clone()
        times = [done - (1 - bucket.after) * self._step for bucket in early.buckets]
        beside, self._beside = self._beside, True
        queue, waiting = times[0], list[Bucket]()  # those whose later messages are not sent yet
        for bucket, complete in zip((*early.buckets, None), (*times, None), strict=True):
            while waiting and (complete is None or self._comes_first(waiting[0], queue, complete, key)):
                self._now = queue
                self._go(waiting.pop(0).later, groups, key)
                queue = self._now
            if bucket is not None and complete is not None:
                self._now = complete
                self._go(bucket.first, groups, key)
                waiting += [bucket] * early.queued
        self._now = queue
        self._go(early.waits, groups, key)
        queue, self._now, self._beside = self._now, done, beside
        self._go(early.heads[0], groups, key)
        self._go(early.heads[1], groups, key)
        if early.queued:
            self._in_flight["queue"] = (groups.latest(done), queue)
            self._wait("queue")
        else:
            for bucket in early.buckets:
                self._go(bucket.rest, groups, key)
        self._flown.copy_(flown + _mean(torch.maximum(queue, self._now) - times[0]))

    def _comes_first(self, bucket: Bucket, queue: Tensor, complete: Tensor, key: Key) -> bool:
        """Whether a bucket's later messages come before the first of one that is complete then."""
        for event in bucket.rest[:1]:
            assert isinstance(event, Waited)
            queue = torch.maximum(queue, self._in_flight[key(event.name)][1])
        return bool(queue[0].max() < complete[0].max())  # on the first network, the cluster's own

    def run_sidecars(self, profile: MethodProfile, place: int, round: int) -> None:
        """A round run by sidecars: each joins with its own worker, or some time after it is called."""
        if not profile.sidecars_send(place, round):
            self._sidecar = torch.maximum(self._sidecar, self._now)
            return
        part, groups = profile.sync.parts[place], profile.groups(place, round)
        now = self._now.expand(self._shape)
        assert isinstance(part, Waitfree)
        if isinstance(part, CodedGradients):
            self._decode(part, profile.waitfree[place])
            return
        start = torch.maximum(self._sidecar, now)
        if not part.blocking(round):
            called = now.amin(-1, keepdim=True)  # by the first to arrive
            if isinstance(part, EagerGradients) and part.activation == "majority":
                initiator = draw_whole(part.seed, round, "initiator") % profile.workers
                called = now[..., initiator % self._width, None]
            awake = torch.maximum(self._sidecar, torch.minimum(now, called + self._costs.announcement))
            late = torch.minimum(now, self._patience(part, awake))
            start = torch.where(now <= awake, awake, late)
        busy, delay = self._costs.of("mean", profile.waitfree[place], groups)
        if self._width > 1:
            start = torch.maximum(groups.latest(start), groups.latest(self._free))
        self._free = start + busy
        self._land_sidecars(now, busy, delay)
        self._now = torch.maximum(now, self._sidecar)

    def _decode(self, part: CodedGradients, size: Size) -> None:
        """A round of coded gradients, which ends with the first answers that decode."""
        began, now = self._resumed.expand(self._shape), self._now.expand(self._shape)
        call = self._costs.announcement
        start = torch.maximum(self._sidecar, find_enough(part, now) + call) + call
        if len(self._past) >= part.behind:
            start = torch.maximum(start, self._past[-part.behind])  # no worker is further behind
        busy, delay = self._costs.of("mean", size, self._world)
        self._free = torch.maximum(start.amax(-1, keepdim=True), self._free) + busy
        self._land_sidecars(now, busy, delay)
        # A worker that is late ends the part of the batch it is at, and leaves out the rest.
        each = (now - began) / part.load
        parts = ((self._sidecar - began) / each).ceil().clamp_(min=0)
        late, left = now > self._sidecar, torch.minimum(now, began + parts * each)
        self._computed -= ((now - left) * late).mean(-1)
        self._now = torch.where(late, left, self._sidecar)
        self._past = [*self._past[1 - part.behind :], self._now.amax(-1, keepdim=True)]

    def _land_sidecars(self, now: Tensor, busy: Tensor, delay: Tensor) -> None:
        """A round of sidecars lands once the links are free. Count how long workers wait for it."""
        self._sidecar = (self._free + delay).expand_as(now)
        waited = (self._sidecar - now).clamp_(min=0)
        exposed = torch.minimum(waited, busy + delay)
        self._exposed += exposed.mean(-1)
        self._skewed += (waited - exposed).mean(-1)
        self._flown += (busy + delay).mean(-1)

    def _patience(self, part: Waitfree, awake: Tensor) -> Tensor:
        """Return until when sidecars that are called at `awake` wait for their workers."""
        if part.grace is not None:
            return awake + part.grace
        resumed = self._resumed.expand(self._shape)
        overdue = resumed + find_allowances(self._compute, self._width)
        return torch.where(resumed <= awake, torch.maximum(awake, overdue), awake)

    def mark(self, kind: object) -> None:
        """Note the progress of the last worker since the previous moment."""
        before, self._last = self._last, self._latest
        self._paces.setdefault(kind, []).append(self._last - before)

    def start_here(self) -> None:
        """Begin to count now."""
        self._last = self._origin = self._latest
        self._paces.clear()
        self._seconds.zero_()

    def note(self, done: int) -> Instant:
        """Return all times after this number of steps."""
        times = dict[object, Tensor]()
        for queue, at in {-1: self._free, **self._queues}.items():
            times[queue] = torch.maximum(at, self._now)
        for (who, when, place), (ready, lands) in self._in_flight.items():
            times[who, when - done, place], times[who, when - done, place, "lands"] = ready, lands
        return Instant(self._now, times, self._seconds.clone())

    def repeat(self, since: Instant, steps: int, times: int) -> None:
        """Let these steps, which are all since an instant, happen several times more."""
        passed, flying = times * (self._now - since.now), self._in_flight
        self._now, self._free = self._now + passed, self._free + passed
        self._queues = {name: at + passed for name, at in self._queues.items()}
        moved = {key: (ready + passed, lands + passed) for key, (ready, lands) in flying.items()}
        self._in_flight = {(who, when + times * steps, n): pair for (who, when, n), pair in moved.items()}
        self._seconds += times * (self._seconds - since.seconds)

    def wait_all(self) -> None:
        """Wait for all messages in flight."""
        for key in list(self._in_flight):
            self._wait(key)

    def spent(self) -> Spent:
        """The seconds since the start."""
        ends = self._latest - self._origin
        variance = ends.var(1) if self._runs > 1 else torch.zeros_like(ends[:, 0])
        if self._runs == 1 and self._compute.spread:  # with one run, moments of the same kind are the sample
            for paces in self._paces.values():
                if len(paces) > 1:
                    variance += torch.stack(paces).var(0)[:, 0] * len(paces)
        return Spent(ends.mean(1), variance, *self._seconds.mean(2))

    @property
    def _latest(self) -> Tensor:
        """The time of the last worker: [network, run]."""
        return self._range()[2][..., 0]

    def _range(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first, the mean and the last worker's time, worked out once per `_now`."""
        now = self._now
        if now.shape[-1] == 1:
            return now, now, now
        if self._known is None or self._known[0] is not now:
            self._known = now, (now.amin(-1, True), now.mean(-1, True), now.amax(-1, True))
        return self._known[1]


def _mean(values: Tensor) -> Tensor:
    """Return the mean over the workers, faster if there is only one."""
    return values[..., 0] if values.shape[-1] == 1 else values.mean(-1)
