"""The threads of simulated workers, and what they can wait for: one runs at a time, the earliest first."""

import heapq
import itertools
import threading
from collections import deque
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
# A communicator's members, after those of the communicators it was made from; (−n,) is its nth duplicate.
Path = tuple[tuple[int, ...], ...]
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
class Call:
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
        self.calls: dict[tuple[Path, str, int], Call] = {}
        self.departures: dict[int, Departure] = {}
        self.failure: BaseException | None = None
        self.tracks: WeakSet[Track] = WeakSet()  # of all runs
        self.heard: dict[tuple[Path, int], int] = {}  # numbers announced, by sidecar
        self.views: dict[tuple[Path, int], Communicator] = {}
        self.on_exit: dict[int, list[Callable[[], None]]] = {rank: [] for rank in range(workers)}
        self.threads: list[threading.Thread] = []
        self.current = 0  # the actor that holds the baton
        self.clocks: list[float] = []  # of every actor, as what follows
        self.waiting: dict[int, Call | Condition | None] = {}  # None: can run
        self.task_queues: dict[int, list[VirtualQueue]] = {}
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

    def wait(self, actor: int, call: Call) -> None:
        """Give the baton away until the call is complete, then move this actor's clock to its landing."""
        task_queues = self.task_queues.get(actor, [])
        if call.missing and not any(task_queue.busy for task_queue in task_queues):
            for task_queue in task_queues:  # other workers may wait for its jobs; errors are raised later
                with suppress(BaseException):
                    task_queue.close()
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

    def has_landed(self, actor: int, call: Call) -> bool:
        """Whether a message has landed by now. First lets all actors that are behind in time catch up."""
        self.catch_up(actor)
        return not call.missing and call.lands <= self.clocks[actor]

    def wake(self, now: float) -> None:
        """Let actors continue from now whose condition has come true."""
        for wait in self.waiting.values():
            if isinstance(wait, Condition) and not wait.holds and wait.ready():
                wait.due, wait.holds = now, True

    def catch_up(self, actor: int) -> None:
        """Let all actors run that are behind in time, or come before this one at the same time."""
        self._rng[actor] = torch.get_rng_state()
        self.hand_over()
        self._enter(actor)

    def _enter(self, actor: int) -> None:
        self._turns[actor].acquire()
        self.current = actor
        torch.set_rng_state(self._rng[actor])

    def hand_over(self) -> None:
        """Pass the baton to the earliest actor that can move."""
        first = self._first()
        while self._posts and (first is None or self._posts[0][0] < first[0]):
            when, _, deliver = heapq.heappop(self._posts)
            deliver(when)
            first = self._first()
        if first is None and self.waiting:
            self.failure = self.failure or self._explain_standstill()
            first = min((self.clocks[actor], actor) for actor in self.waiting)
        if first is not None:
            when, actor = first
            self.clocks[actor] = max(self.clocks[actor], when)
            self.waiting[actor] = None
            self._turns[actor].release()

    def _first(self) -> tuple[float, int] | None:
        """The first actor that can move, and from which time on."""
        able = []
        for actor, what in self.waiting.items():
            if isinstance(what, Condition):
                if what.due is not None:
                    able.append((max(what.due, self.clocks[actor]), actor))
            elif what is None or not what.missing or not what.missing.isdisjoint(self.departures):
                able.append((self.clocks[actor], actor))
        return min(able, default=None)

    def _explain_standstill(self) -> BaseException:
        """The error when nobody can move: workers are in different places, or wait for each other."""
        if (apart := find_disagreement(sorted(self.tracks, key=lambda track: track.rank))) is not None:
            return Disagreement(apart)
        waits = []
        for rank, what in self.waiting.items():
            if rank not in self.on_exit or what is None:
                continue  # a sidecar waits for its worker
            if isinstance(what, Condition):
                waits.append(what.what)
            else:
                others = ", ".join(f"rank {other}" for other in what.members if other not in what.posts)
                waits.append(f"rank {rank} waits for {what.posts[rank]} from {others}")
        return Deadlock("Nobody can move: " + "; ".join(waits) + ".")


class VirtualQueue(TaskQueue):
    """Runs jobs when a worker waits for a result, at the virtual time at which a thread would have run them.
    During a job, the actor's clock is the queue's."""

    def __init__(self, scheduler: Scheduler, actor: int) -> None:
        super().__init__()
        self._clocks, self._actor, self._now, self.busy = scheduler.clocks, actor, 0.0, False
        self._open: deque[Callable[[], None]] = deque()
        scheduler.task_queues.setdefault(actor, []).append(self)

    def give(self, job: Callable[[], T]) -> Pending[T]:
        clocks, actor, result = self._clocks, self._actor, list[T]()
        given, done = clocks[actor], [0.0]

        def run() -> None:
            worker, self.busy = clocks[actor], True
            clocks[actor] = max(self._now, given)
            try:
                result.append(self._do(job))
            finally:
                self._now = done[0] = clocks[actor]
                clocks[actor] = worker
                self.busy = False

        def wait() -> T:
            while not result:
                if self._error is not None:
                    raise self._error
                self._open.popleft()()
            clocks[actor] = max(clocks[actor], done[0])
            return result[0]

        self._open.append(run)
        return Pending(wait, lambda: bool(result) and done[0] <= clocks[actor], lambda: done[0])

    def close(self) -> None:
        while self._open and self._error is None:
            self._open.popleft()()
