"""The threads of simulated workers: one runs at a time, the earliest first."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from offbeat.base.errors import Deadlock, Disagreement
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure, Track, find_disagreement
from offbeat.simulate.failures import Failures, Uptime
from offbeat.simulate.network import Network, Traffic
from offbeat.simulate.waits import Call, Condition

if TYPE_CHECKING:
    from offbeat.simulate.background import VirtualQueue

# A communicator's members, after those of the communicators it was made from; (−n,) is its nth duplicate.
Path = tuple[tuple[int, ...], ...]


class Scheduler:
    """The threads of all workers. One holds the baton and runs; the others wait for a message or their turn.

    An actor is a thread: first those of the ranks, then those of their sidecars. At the same virtual time,
    ranks act before sidecars, in order.
    """

    def __init__(
        self, workers: int, network: Network, compute: Callable[[int, int], float], failures: Failures
    ) -> None:
        self.network, self.compute = network, compute
        self.traffic = Traffic(network)
        self._uptimes = [Uptime(failures, rank) for rank in range(workers)]
        self.clocks = [0.0] * workers
        self.calls: dict[tuple[Path, str, int], Call] = {}
        self.departures: dict[int, Departure] = {}
        self.failure: BaseException | None = None
        self.tracks: WeakSet[Track] = WeakSet()  # of all runs
        self.heard: dict[tuple[Path, int], int] = {}  # numbers announced, by sidecar
        self.views: dict[tuple[Path, int], Communicator] = {}
        self.waiting: dict[int, Call | Condition | None] = dict.fromkeys(range(workers))  # None: can run
        self.task_queues: dict[int, list[VirtualQueue]] = {}  # of every actor
        self.current = 0  # the actor that holds the baton
        self.sidecars: list[threading.Thread] = []
        self.on_exit: dict[int, list[Callable[[], None]]] = {rank: [] for rank in range(workers)}
        self._ranks = list(range(workers))  # of every actor
        self._posts: list[tuple[float, int, Callable[[float], None]]] = []
        self._posted = 0
        self._turns = [_turn() for _ in range(workers)]
        self._rng = [torch.get_rng_state() for _ in range(workers)]

    def spawn(self, rank: int) -> int:
        """Add an actor for a rank; it does not run yet."""
        self.clocks.append(self.clocks[rank])
        self._ranks.append(rank)
        self._turns.append(_turn())
        self._rng.append(torch.get_rng_state())
        return len(self.clocks) - 1

    def play(self, actor: int, work: Callable[[], None]) -> None:
        """Start an actor, at the time at which it was spawned."""

        def run() -> None:
            self.enter(actor)
            work()
            del self.waiting[actor]
            self.hand_over()

        self.waiting[actor] = None
        self.sidecars.append(threading.Thread(target=run, daemon=True))
        self.sidecars[-1].start()

    def post(self, when: float, deliver: Callable[[float], None]) -> None:
        """Deliver something at a given time, in nobody's turn."""
        self._posted += 1
        heapq.heappush(self._posts, (when, self._posted, deliver))

    def computed(self, rank: int, step: int) -> None:
        """Move the worker's clock by the time of a gradient and of the failures during it."""
        seconds = self.compute(rank, step)
        self.clocks[rank] += seconds + self._uptimes[rank].lost(seconds)

    def wait(self, actor: int, call: Call) -> None:
        """Give the baton away until the call is complete, then move this actor's clock to its landing."""
        task_queues = self.task_queues.get(actor, [])
        if call.missing and not any(task_queue.busy for task_queue in task_queues):
            for task_queue in task_queues:
                task_queue.catch_up()
        if call.missing:
            self.waiting[actor] = call
            self.catch_up(actor)
        if call.error is not None:
            raise Disagreement(call.error)
        if call.missing:
            raise self._why_never(self._ranks[actor], call)
        self.clocks[actor] = max(self.clocks[actor], call.lands)

    def has_landed(self, actor: int, call: Call) -> bool:
        """Whether a message has landed by now. First lets all actors that are behind in time catch up."""
        self.catch_up(actor)
        return not call.missing and call.lands <= self.clocks[actor]

    def _why_never(self, rank: int, call: Call) -> BaseException:
        for other in call.members:
            if other not in call.posts and other in self.departures:
                return self.departures[other].error(other, f"the {call.posts[rank]}")
        assert self.failure is not None
        return self.failure

    def catch_up(self, actor: int) -> None:
        """Let all actors run that are behind in time, or come before this one at the same time."""
        self._rng[actor] = torch.get_rng_state()
        self.hand_over()
        self.enter(actor)

    def enter(self, actor: int) -> None:
        self._turns[actor].acquire()
        self.current = actor
        torch.set_rng_state(self._rng[actor])

    def exit(self, rank: int, error: BaseException | None) -> None:
        if error is not None:
            self.failure = self.failure or error
            self.departures.setdefault(rank, Departure.of(error))
        del self.waiting[rank]
        self.departures.setdefault(rank, Departure("has returned"))
        for leave in self.on_exit[rank]:
            leave()
        self.hand_over()

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
                if (due := what.due) is not None:
                    able.append((max(due, self.clocks[actor]), actor))
            elif what is None or self._over(what):
                able.append((self.clocks[actor], actor))
        return min(able, default=None)

    def _over(self, call: Call) -> bool:
        return not call.missing or not call.missing.isdisjoint(self.departures)

    def _explain_standstill(self) -> BaseException:
        """The error when nobody can move: workers are in different places, or wait for each other."""
        apart = find_disagreement(sorted(self.tracks, key=lambda track: track.rank))
        if apart is not None:
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


def _turn() -> threading.Lock:
    """A lock that is acquired when somebody releases it."""
    turn = threading.Lock()
    turn.acquire()
    return turn
