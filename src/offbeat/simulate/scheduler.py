"""The threads of simulated workers, and what they wait for. One runs at a time, the earliest first."""

import heapq
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from offbeat.base.errors import Deadlock, Disagreement
from offbeat.comm.background import TaskQueue
from offbeat.comm.collective import Collective, nbytes
from offbeat.comm.communicator import Communicator, Pending
from offbeat.comm.presence import Departure, Track, find_disagreement
from offbeat.simulate.compute import Failures, Uptime
from offbeat.simulate.network import Network, Traffic

T = TypeVar("T")
# The members of a communicator, after those of the ones it was made from; (−n,) marks the nth duplicate.
CommPath = tuple[tuple[int, ...], ...]
StepSeconds = Callable[[int, int], float]  # by rank and step


@dataclass
class Post:
    """One worker's part of a collective."""

    kind: Collective
    tensors: list[Tensor]
    when: float

    def __str__(self) -> str:
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors]
        return f"{self.kind.name} of {', '.join(shapes)}"


@dataclass
class CollectiveCall:
    """One collective: what its members have posted, and when its results land."""

    members: tuple[int, ...]
    missing: set[int]  # the members that have not posted yet
    posts: dict[int, Post] = field(default_factory=dict)
    results: list[list[Tensor]] = field(default_factory=list)
    lands: float = 0.0
    error: str | None = None

    def resolve(self, src: int, traffic: Traffic, *, queue: bool) -> None:
        """Work out the results once all members have posted."""
        posts = [self.posts[rank] for rank in self.members]
        first, what = posts[0], str(posts[0])
        for rank, post in zip(self.members, posts, strict=True):
            if (other := str(post)) != what:
                self.error = f"Workers disagree: rank {self.members[0]} sends {what}, rank {rank} {other}."
                return
        with torch.no_grad():
            self.results = first.kind.results([post.tensors for post in posts], src, range(len(posts)))
        ready = max(post.when for post in posts)
        self.lands = traffic.carry(first.kind.name, self.members, nbytes(first.tensors), ready, queue=queue)


@dataclass
class Condition:
    """A wait for a condition, with an optional deadline."""

    ready: Callable[[], bool]
    what: str
    due: float | None  # the deadline, or when the condition was first seen to hold
    holds: bool = False


class Scheduler:
    """The threads of all workers, called actors. One holds the baton and runs; the others wait for a message
    or their turn. At the same virtual time, ranks act before sidecars, in order."""

    def __init__(self, workers: int, network: Network, compute: StepSeconds, failures: Failures) -> None:
        self.compute, self.traffic = compute, Traffic(network)
        self.shares = [0.0] * workers  # of the gradient under way that each has computed
        self.uptimes = [Uptime(failures, rank) for rank in range(workers)]
        self.calls: dict[tuple[CommPath, str, int], CollectiveCall] = {}
        self.departures: dict[int, Departure] = {}
        self.failure: BaseException | None = None
        self.tracks: WeakSet[Track] = WeakSet()  # of all runs
        self.heard: dict[tuple[CommPath, int, int], int] = {}  # numbers announced, by sidecar and sender
        self.views: dict[tuple[CommPath, int], Communicator] = {}
        self.on_exit: dict[int, list[Callable[[], None]]] = {rank: [] for rank in range(workers)}
        self.threads: list[threading.Thread] = []
        self.current = 0  # the actor that holds the baton
        self.clocks: list[float] = []  # of every actor, as what follows
        self.waiting: dict[int, CollectiveCall | Condition | None] = {}  # None: can run
        self._ranks: list[int] = []
        self._turns: list[threading.Lock] = []  # a lock is released when it is the actor's turn
        self._rng: list[Tensor] = []
        self._posts: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()  # of posts: those of the same time are delivered in order
        for rank in range(workers):
            self.add(rank, 0.0)

    def add(self, rank: int, now: float) -> int:
        """Add an actor for a rank; it does not run yet."""
        self.clocks.append(now)
        self._ranks.append(rank)
        self._turns.append(threading.Lock())
        self._turns[-1].acquire()
        self._rng.append(torch.get_rng_state())
        return len(self.clocks) - 1

    def play(self, actor: int, work: Callable[[], None]) -> None:
        """Start the thread of an actor. It runs when it gets the baton."""

        def run() -> None:
            self._enter(actor)
            work()
            del self.waiting[actor]
            self.hand_over()

        self.waiting[actor] = None
        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def post(self, when: float, deliver: Callable[[float], None]) -> None:
        """Deliver something at a given time, before the next actor runs."""
        heapq.heappush(self._posts, (when, next(self._number), deliver))

    def wait(self, call: CollectiveCall) -> None:
        """Pass the baton until the call is complete, then move this actor's clock to its landing."""
        actor = self.current
        if call.missing:
            self.waiting[actor] = call
            self.catch_up(actor)
        if call.error is not None:
            raise Disagreement(call.error)
        if call.missing:
            for other in call.members:
                if other in call.missing and other in self.departures:
                    raise self.departures[other].error(other, f"the {call.posts[self._ranks[actor]]}")
            assert self.failure is not None
            raise self.failure
        self.clocks[actor] = max(self.clocks[actor], call.lands)
        if actor not in self.on_exit:  # in the background, other messages may be sent before
            self.catch_up(actor)

    def has_landed(self, call: CollectiveCall) -> bool:
        """Whether a message has landed. First lets all actors that are behind in time catch up."""
        actor = self.current
        self.catch_up(actor)
        return not call.missing and call.lands <= self.clocks[actor]

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Pass the baton until a condition holds. Raises if no actor can make it hold."""
        if not ready():
            self.waiting[self.current] = Condition(ready, what, None)
            self.catch_up(self.current)
            if not ready():
                assert self.failure is not None
                raise self.failure

    def wake(self, now: float) -> None:
        """Let actors whose condition has become true continue from this time."""
        for wait in self.waiting.values():
            if isinstance(wait, Condition) and not wait.holds and wait.ready():
                wait.due, wait.holds = now, True

    def catch_up(self, actor: int) -> None:
        """Let all actors run that are behind in time, or that act before this one at the same time."""
        if (first := self._choose()) != actor:
            self._rng[actor] = torch.get_rng_state()
            assert first is not None  # this actor waits, too
            self._turns[first].release()
            self._enter(actor)

    def _enter(self, actor: int) -> None:
        self._turns[actor].acquire()
        self.current = actor
        torch.set_rng_state(self._rng[actor])

    def hand_over(self) -> None:
        """Pass the baton on for good."""
        if (first := self._choose()) is not None:
            self._turns[first].release()

    def _choose(self) -> int | None:
        """Deliver what is due, and return the earliest actor that can move, its clock set to that time. None
        if no actor is left."""
        first = self._first()
        while self._posts and (first is None or self._posts[0][0] < first[0]):
            when, _, deliver = heapq.heappop(self._posts)
            deliver(when)
            first = self._first()
        if first is None and self.waiting:
            self.failure = self.failure or self._explain_standstill()
            first = min((self.clocks[actor], actor) for actor in self.waiting)
        if first is None:
            return None
        when, actor = first
        self.clocks[actor] = max(self.clocks[actor], when)
        self.waiting[actor] = None
        return actor

    def _first(self) -> tuple[float, int] | None:
        """Return the first actor that can move, and from which time."""
        able = []
        for actor, what in self.waiting.items():
            if isinstance(what, Condition):
                if what.due is not None:
                    able.append((max(what.due, self.clocks[actor]), actor))
            elif what is None or not what.missing or not what.missing.isdisjoint(self.departures):
                able.append((self.clocks[actor], actor))
        return min(able, default=None)

    def _explain_standstill(self) -> BaseException:
        """Return the error when no actor can move: workers disagree, or wait for each other."""
        if (apart := find_disagreement(sorted(self.tracks, key=lambda track: track.rank))) is not None:
            return Disagreement(apart)
        waits = []
        for actor, what in self.waiting.items():
            if isinstance(what, CollectiveCall):
                rank = self._ranks[actor]
                others = ", ".join(f"rank {other}" for other in what.members if other not in what.posts)
                waits.append(f"rank {rank} waits for {what.posts[rank]} from {others}")
            elif what is not None and actor in self.on_exit:  # sidecars and queues wait for their worker
                waits.append(what.what)
        return Deadlock("No worker can continue: " + "; ".join(waits) + ".")


class BackgroundActor:
    """A background actor of a worker, so that a job and the worker can wait for different messages.

    It runs the jobs of its task queues in the order given, each at the time of its queue.
    """

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self.scheduler, self.rank = scheduler, rank
        self.queues: set[VirtualQueue] = set()  # those that have not ended
        self.jobs: list[Callable[[], None]] = []  # the first one may be running
        self.actor = scheduler.add(rank, scheduler.clocks[rank])
        scheduler.on_exit[rank].append(self.queues.clear)
        scheduler.on_exit[rank].append(self.notify)
        scheduler.play(self.actor, self._work)

    def _work(self) -> None:
        with suppress(BaseException):  # an error that the workers raise
            while self.queues:
                self.scheduler.until(lambda: bool(self.jobs) or not self.queues, "a job")
                if self.jobs:
                    self.jobs[0]()
                    del self.jobs[:1]
                self.notify()

    def notify(self) -> None:
        """Wake actors that wait for what has just happened."""
        self.scheduler.wake(self.scheduler.clocks[self.scheduler.current])


class VirtualQueue(TaskQueue):
    """Runs jobs at the virtual time at which a thread would have run them."""

    def __init__(self, background: BackgroundActor) -> None:
        self._background, self._now = background, 0.0
        background.queues.add(self)

    def give(self, job: Callable[[], T]) -> Pending[T]:
        scheduler, me, result, done = self._background.scheduler, self._background.actor, list[T](), [0.0]
        clocks, given = scheduler.clocks, scheduler.clocks[scheduler.current]

        def run() -> None:
            clocks[me] = max(self._now, given)
            scheduler.catch_up(me)  # others may send before
            with suppress(BaseException):  # `wait` raises it
                result.append(self._do(job))
            self._now = done[0] = clocks[me]

        def wait() -> T:
            told = f"rank {self._background.rank} waits for its task queue"
            scheduler.until(lambda: bool(result) or self._error is not None, told)
            if not result and self._error is not None:
                raise self._error
            clocks[scheduler.current] = max(clocks[scheduler.current], done[0])
            return result[0]

        self._background.jobs.append(run)
        self._background.notify()
        return Pending(wait, lambda: bool(result) and done[0] <= clocks[scheduler.current], lambda: done[0])

    def close(self) -> None:
        background = self._background
        background.scheduler.until(
            lambda: not background.jobs, f"rank {background.rank} waits for its task queue"
        )
        self.abandon()

    def abandon(self) -> None:
        self._background.jobs = []
        self._background.queues.discard(self)
        self._background.notify()
