"""Runs many workers in one process, one at a time, and gives each a communicator."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from offbeat.comm.background import Sidecar, Stopped, TaskQueue
from offbeat.comm.collective import Collective
from offbeat.comm.communicator import Communicator, Pending, Worker
from offbeat.comm.presence import Departure, Track
from offbeat.simulate.compute import Failures
from offbeat.simulate.network import Network
from offbeat.simulate.scheduler import (
    BackgroundActor,
    CollectiveCall,
    CommPath,
    Condition,
    Post,
    Scheduler,
    StepSeconds,
    VirtualQueue,
)

T = TypeVar("T")
_ANNOUNCEMENT = 8  # bytes


def simulate(
    worker: Callable[[Communicator], T],
    workers: int,
    *,
    network: Network | None = None,
    compute: StepSeconds | None = None,
    failures: Failures | None = None,
) -> list[T]:
    """Run `worker(comm)` for every rank in one process, and return the results in rank order.

    Exactly one worker runs at a time, and workers switch only where one waits for a message, so a run is a
    pure function of its inputs. Each worker has its own torch random state, which starts as the caller's.

    Reports are in virtual seconds. `compute(rank, step)` is the time that a worker needs for the gradient
    after `step` iterations: a function, or a value such as `Jittered(0.2)`. `network` says how long messages
    take, and `failures` how often workers fail and how long they are away.

        def worker(comm):
            model, optimizer, batches = build(comm.rank)
            with offbeat.local_sgd(model, optimizer, every=8, group=comm) as sync:
                for x, y in batches: ...
            return sync.totals
        totals = simulate(worker, workers=4, network=Network(latency=0.02, bandwidth=12.5e6))
    """
    if workers < 1:
        raise ValueError(f"simulate(workers={workers}): workers must be at least 1.")
    rng, network, results = torch.get_rng_state(), network or Network(), dict[int, T]()
    network.check(workers)
    scheduler = Scheduler(workers, network, compute or (lambda rank, step: 0.0), failures or Failures(0.0))

    def work(rank: int) -> None:
        departure = Departure("has returned")
        try:
            results[rank] = worker(find_view(scheduler, (tuple(range(workers)),), rank))
        except BaseException as error:  # raised again in the caller's thread
            scheduler.failure = scheduler.failure or error
            departure = Departure.of(error)
        scheduler.departures.setdefault(rank, departure)
        for leave in scheduler.on_exit[rank]:
            leave()

    for rank in range(workers):
        scheduler.play(rank, functools.partial(work, rank))
    scheduler.hand_over()
    for thread in scheduler.threads:  # workers add the threads of their sidecars
        thread.join()
    torch.set_rng_state(rng)
    if scheduler.failure is not None:
        raise scheduler.failure
    return [results[rank] for rank in range(workers)]


class Virtual(Communicator, Worker):
    """One simulated worker's view of its peers."""

    def __init__(self, scheduler: Scheduler, path: CommPath, me: int) -> None:
        self._scheduler, self._path, self._me = scheduler, path, me
        self._members, self._number, self._duplicates, self._runs = path[-1], Counter[str](), 0, 0
        self.rank, self.size = self._members.index(me), len(self._members)
        self._background: BackgroundActor | None = None

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        lane, given, scheduler = "control" if control else "data", list(tensors), self._scheduler
        key = (self._path, lane, self._number[lane])
        self._number[lane] += 1
        call = scheduler.calls.setdefault(key, CollectiveCall(self._members, set(self._members)))
        call.posts[self._me] = Post(kind, given, self.now())
        call.missing.discard(self._me)
        if not call.missing:
            del scheduler.calls[key]
            call.resolve(src, scheduler.traffic, queue=not control)

        def wait() -> list[Tensor]:
            scheduler.wait(call)
            return kind.deliver(given, call.results[self.rank])

        return Pending(wait, lambda: scheduler.has_landed(call), lambda: call.lands)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        members = tuple(self._members[rank] for group in groups if self.rank in group for rank in group)
        return find_view(self._scheduler, (*self._path, members), self._me)

    @property
    def worker(self) -> Worker:
        return self

    def duplicate(self) -> Communicator:
        return find_view(self._scheduler, self._path_beside(), self._me)

    def task_queue(self) -> TaskQueue:
        """Queues share an actor if no duplicate was made in between."""
        if self._background is None or not self._background.queues:
            self._background = BackgroundActor(self._scheduler, self._me)
        return VirtualQueue(self._background)

    def sidecar(self) -> Sidecar:
        return VirtualSidecar(self._scheduler, self._path_beside(), self._me)

    def _path_beside(self) -> CommPath:
        self._duplicates, self._background = self._duplicates + 1, None
        return (*self._path, (-self._duplicates,), self._members)

    def leave(self, departure: Departure) -> None:
        self._scheduler.departures.setdefault(self._me, departure)

    def follow(self, track: Track) -> None:
        self._runs += 1
        track.key = f"{self._path}/run {self._runs}"
        self._scheduler.tracks.add(track)

    def now(self) -> float:
        return self._scheduler.clocks[self._scheduler.current]

    def computed(self, step: int, share: float = 1.0) -> None:
        """Advance the worker's clock by a gradient, or a share of one, and by failures during it."""
        scheduler, me = self._scheduler, self._me
        seconds = max(0.0, share - scheduler.shares[me]) * scheduler.compute(me, step)
        scheduler.shares[me] = 0.0 if share == 1 else share
        scheduler.clocks[me] += seconds + scheduler.uptimes[me].lose(seconds)

    def skip(self) -> None:
        self._scheduler.shares[self._me] = 1.0


def find_view(scheduler: Scheduler, path: CommPath, me: int) -> Communicator:
    """Return the view of a communicator that worker `me` has. There is only one: it numbers the messages."""
    return scheduler.views.setdefault((path, me), Virtual(scheduler, path, me))


class VirtualSidecar(Sidecar):
    """Another actor of the scheduler, with its own clock. Before an actor touches shared state, all actors
    behind it in virtual time catch up, so changes happen in the order of time."""

    def __init__(self, scheduler: Scheduler, path: CommPath, rank: int) -> None:
        self._scheduler, self._path, self._rank, self._stopped = scheduler, path, rank, False
        self._actor = scheduler.add(rank, scheduler.clocks[rank])
        self.comm = find_view(scheduler, path, rank)
        self._error: BaseException | None = None
        scheduler.on_exit[rank].append(self.stop)

    def heard_from(self, rank: int) -> int:
        return self._scheduler.heard.get((self._path, self._rank, rank), -1)

    def start(self, work: Callable[[], None]) -> None:
        def guard() -> None:
            try:
                work()
            except Stopped:
                pass
            except BaseException as error:
                self._error = error
                self._scheduler.wake(self._scheduler.clocks[self._actor])

        self._scheduler.play(self._actor, guard)

    @contextmanager
    def locked(self) -> Iterator[None]:
        scheduler = self._scheduler
        scheduler.catch_up(scheduler.current)
        yield
        scheduler.wake(scheduler.clocks[scheduler.current])

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        scheduler, me = self._scheduler, self._scheduler.current
        now, told = scheduler.clocks[me], f"rank {self._rank} waits for {what}"
        scheduler.wake(now)
        due = None if seconds is None else now + seconds
        wait = Condition(lambda: ready() or self._stopped or self._error is not None, told, due)
        if not wait.ready():
            scheduler.waiting[me] = wait
            scheduler.catch_up(me)
        if not ready():
            self.check()
        if self._stopped:
            raise Stopped
        if wait.due is None and not ready():
            assert scheduler.failure is not None
            raise scheduler.failure
        return ready()

    def announce(self, number: int, to: int | None = None) -> None:
        scheduler, me = self._scheduler, self._rank
        arrival = scheduler.clocks[scheduler.current] + scheduler.traffic.network.seconds(_ANNOUNCEMENT)
        heard, path = scheduler.heard, self._path
        source = self.comm.rank

        def deliver(rank: int, when: float) -> None:
            key = (path, rank, source)
            heard[key] = max(heard.get(key, -1), number)
            scheduler.wake(when)

        for place, rank in enumerate(path[-1]):
            if to in (None, place) and rank == me:
                heard[path, me, source] = max(self.heard_from(source), number)
            elif to in (None, place):
                scheduler.post(arrival, functools.partial(deliver, rank))

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped = True
        self._scheduler.wake(self._scheduler.clocks[self._rank])
