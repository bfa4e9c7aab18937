"""Run the clocks of all workers through a method: many runs and many bandwidths at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.plan.fit import Size
from offbeat.plan.groups import Groups, cost
from offbeat.plan.probe import Trace
from offbeat.plan.recording import Beside, Event, Repeated, Sent, Waited, sent_in
from offbeat.plan.waitfree_model import WaitfreeModel
from offbeat.simulate import Compute, Network

_CHUNK = 2**15  # times drawn at once: they fit a cache
_SETTLED = 8  # turns of a ring after which every turn takes as long as the last
_APART = 10_000_019  # steps between runs, so that no two draw the same times


class Clocks:
    """The time of every worker: [network, run, worker], with one worker while all have the same time.

    Each worker of each run draws its own step times; all networks share them. `skewed` and `exposed` are the
    seconds that workers wait, on average: for slower workers, and for messages.
    """

    def __init__(self, networks: Sequence[Network], compute: Compute, workers: int, runs: int) -> None:
        self._compute, self._runs, self.luck = compute, runs, compute.spread
        # Workers that never differ are one worker.
        self._width = workers if compute.spread else 1
        shape = self._shape = (len(networks), runs, self._width)
        self.now = torch.zeros(shape, dtype=torch.float64)
        self.free = torch.zeros(shape, dtype=torch.float64)  # when their links become free
        self._sidecar = torch.zeros(shape, dtype=torch.float64)
        self._resumed = self.now  # when they last began to compute
        self._queues: dict[int, Tensor] = {}  # the times of their task queues
        self.computed, self.skewed, self.exposed, self.flown = (
            torch.zeros(shape[:2], dtype=torch.float64) for _ in range(4)
        )
        self._world = Groups(workers)
        self._ranks = torch.arange(self._width).repeat(runs)
        self._offsets = (torch.arange(runs) * _APART).repeat_interleave(self._width)
        self.paces: dict[object, list[Tensor]] = {}  # of the last worker between moments, by kind
        self._last = self.origin = torch.zeros(shape[:2], dtype=torch.float64)
        self._air: dict[object, tuple[Tensor, Tensor]] = {}  # when the last member sent it, when it lands
        self._known: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None = None

    def compute(self, steps: Sequence[int] | range) -> None:
        """Compute the gradients of these steps. The first run has the times of a simulation."""
        if not steps:
            return
        self._resumed = self.now
        if not self._compute.spread:
            seconds = float(self._compute(0, 0)) * len(steps)
            self.now = self.now + seconds
            self.computed += seconds
            return
        drawn = torch.tensor(steps)
        rows = max(1, _CHUNK // len(steps))  # workers drawn together
        sums = []
        for start in range(0, len(self._ranks), rows):
            rank, run = (which[start : start + rows, None] for which in (self._ranks, self._offsets))
            sums.append(self._compute.seconds(rank, drawn + run).sum(-1))
        times = torch.cat(sums).view(self._runs, self._width)
        self.now = self.now + times
        self.computed += times.mean(-1)

    def act(self, acts: Trace, groups: Groups, key: Callable[[int], object], costs: Costs) -> None:
        """Let all workers send and wait as in this trace."""
        self._go(acts.events, acts, groups, key, costs)

    def _go(
        self,
        events: Sequence[Event],
        acts: Trace,
        groups: Groups,
        key: Callable[[int], object],
        costs: Costs,
    ) -> None:
        for event in events:
            if isinstance(event, Sent):
                among = self._world if event.everyone else groups
                busy, delay = costs.of(event.kind, acts.sizes[event.number], among)
                self._send(key(event.number), among, busy, delay, event.control)
            elif isinstance(event, Waited):
                self._wait(key(event.number))
            elif isinstance(event, Beside):
                worker, still = self.now, (self.skewed.clone(), self.exposed.clone())
                self.now = torch.maximum(worker, self._queues.get(event.task_queue, worker))
                self._go(event.events, acts, groups, key, costs)
                done, self.now = self.now, worker
                self._queues[event.task_queue] = done
                self.skewed, self.exposed = still  # the task queue waited, not the worker
                self._air[key(event.number)] = (worker, done)

            elif isinstance(event, Repeated):
                self._repeat(event, acts, groups, key, costs)

    def _repeat(
        self, event: Repeated, acts: Trace, groups: Groups, key: Callable[[int], object], costs: Costs
    ) -> None:
        """Go through the first turns, then extrapolate from the last of them."""
        turns = min(event.times, _SETTLED)
        for _ in range(turns - 1):
            self._go(event.events, acts, groups, key, costs)
        seconds = (self.skewed, self.exposed, self.flown)
        before = [time.clone() for time in seconds]
        now, free, air = self.now, self.free, dict(self._air)
        self._go(event.events, acts, groups, key, costs)
        rest = event.times - turns
        if rest:
            self.now = self.now + rest * (self.now - now)
            self.free = self.free + rest * (self.free - free)
            for total, past in zip(seconds, before, strict=True):
                total += rest * (total - past)
            for number in {key(sent.number) for sent in sent_in(event.events)} & self._air.keys():
                (ready, lands), (was_ready, landed) = self._air[number], air[number]
                self._air[number] = (ready + rest * (ready - was_ready), lands + rest * (lands - landed))

    def waitfree(self, waitfree: WaitfreeModel, round: int, costs: Costs) -> None:
        """A round run by sidecars: each joins with its own worker, or some time after it is called."""
        if not waitfree.held(round):
            self._sidecar = torch.maximum(self._sidecar, self.now)
            return
        groups = waitfree.among(round)
        now, resumed = self.now.expand(self._shape), self._resumed.expand(self._shape)
        start = torch.maximum(self._sidecar, now)
        if not waitfree.blocking(round):
            first = waitfree.initiator(round)
            called = now.amin(-1, keepdim=True) if first is None else now[..., first % self._width, None]
            awake = torch.maximum(self._sidecar, torch.minimum(now, called + costs.announcement))
            late = torch.minimum(now, waitfree.patience(awake, resumed, self._compute))
            start = torch.where(now <= awake, awake, late)
        busy, delay = costs.of("mean", waitfree.size, groups)
        if self._width > 1:
            start = torch.maximum(groups.latest(start), groups.latest(self.free))
        self.free = start + busy
        self._sidecar = (self.free + delay).expand_as(now)
        waited = (self._sidecar - now).clamp_(min=0)
        exposed = torch.minimum(waited, busy + delay)
        self.exposed += exposed.mean(-1)
        self.skewed += (waited - exposed).mean(-1)
        self.flown += (busy + delay).mean(-1)
        self.now = torch.maximum(now, self._sidecar)

    def start_here(self) -> None:
        """Begin to count now."""
        self._last = self.origin = self.latest
        self.paces.clear()
        for seconds in (self.computed, self.skewed, self.exposed, self.flown):
            seconds.zero_()

    def mark(self, kind: object) -> None:
        """Note how far the last worker has come since the previous moment."""
        latest = self.latest
        self.paces.setdefault(kind, []).append(latest - self._last)
        self._last = latest

    def wait_all(self) -> None:
        """Wait for all messages in the air."""
        for number in list(self._air):
            self._wait(number)

    @property
    def latest(self) -> Tensor:
        """The time of the last worker: [network, run]."""
        return self._range()[2][..., 0]

    def _range(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first, the mean and the last worker's time, worked out once per `now`."""
        if self.now.shape[-1] == 1:
            return self.now, self.now, self.now
        if self._known is None or self._known[0] is not self.now:
            first, mean, last = (f(-1, keepdim=True) for f in (self.now.amin, self.now.mean, self.now.amax))
            self._known = (self.now, (first, mean, last))
        return self._known[1]

    def _send(self, number: object, groups: Groups, busy: Tensor, delay: Tensor, control: bool) -> None:
        ready = self._range()[2] if groups.members is None else groups.latest(self.now)
        if control:
            self._air[number] = (ready, ready + busy + delay)
            return
        self.free = torch.maximum(ready, groups.latest(self.free)) + busy
        self._air[number] = (ready, self.free + delay)

    def _wait(self, number: object) -> None:
        if number not in self._air:
            return  # sent before the window began
        ready, lands = self._air.pop(number)
        self.flown += (lands - ready).mean(-1)
        skewed = torch.zeros(())
        if self.now.shape[-1] > lands.shape[-1]:
            first, mean, last = self._range()
            if bool((lands <= first).all()):
                return  # nobody waits
            if bool((ready >= last).all()):  # all wait, and leave together
                self.skewed += (ready - mean)[..., 0]
                self.exposed += (lands - ready)[..., 0]
                self.now = lands
                return
            if bool((ready > first).any()):
                skewed = (ready - self.now).clamp_(min=0).mean(-1)
        else:
            skewed = (ready - self.now).clamp_(min=0).mean(-1)
        self.skewed += skewed
        self.exposed += (lands - self.now).clamp_(min=0).mean(-1) - skewed
        self.now = torch.maximum(self.now, lands)


class Costs:
    """The seconds of messages, cached by kind, size and groups: [network, 1, worker]."""

    def __init__(self, networks: Sequence[Network], *, alike: bool) -> None:
        self._networks, self._alike = networks, alike
        self._known: dict[object, tuple[Tensor, Tensor, Groups]] = {}

    @property
    def announcement(self) -> Tensor:
        """Seconds of a short message to everyone."""
        seconds = [network.seconds(8) for network in self._networks]
        return torch.tensor(seconds, dtype=torch.float64)[:, None, None]

    def of(self, kind: str, size: Size, groups: Groups) -> tuple[Tensor, Tensor]:
        """Seconds for which the links are busy, and the latency after; the worst if workers are alike."""
        key = (kind, size, None if groups.members is None else id(groups))
        if key not in self._known:
            given = {n: round(size.at(n)) for n in set(groups.sizes.tolist())}
            seconds = cost(self._networks, groups, kind, given)
            busy, delay = self._at_workers(seconds.busy, groups), self._at_workers(seconds.delay, groups)
            self._known[key] = (busy, delay, groups)  # the reference keeps its id from being reused
        return self._known[key][:2]

    def _at_workers(self, seconds: Tensor, groups: Groups) -> Tensor:
        return (seconds.amax(-1, keepdim=True) if self._alike else groups.spread(seconds))[:, None]
