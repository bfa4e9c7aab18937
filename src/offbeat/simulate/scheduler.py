"""The workers' threads, of which one runs at a time, the earliest first."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

from offbeat.base.errors import Deadlock, Disagreement
from offbeat.comm.communicator import Communicator
from offbeat.comm.departure import Departure
from offbeat.comm.place import Track, find_disagreement
from offbeat.comm.task_queue import VirtualQueue
from offbeat.simulate.call import Call, describe
from offbeat.simulate.condition import Condition
from offbeat.simulate.failures import Failures, Uptime
from offbeat.simulate.network import Network, Traffic

Path = tuple[
    tuple[int, ...], ...
]  # a communicator's members, after those it comes from; below 0: a duplicate


class Scheduler:
    """The workers' threads, of which one has the baton and runs; the others wait for a message or a turn.

    An actor is a thread: those of the ranks come first, their sidecars after them. At the same virtual time
    ranks act before sidecars, and in their order.
    """

    def __init__(
        self, workers: int, network: Network, compute: Callable[[int, int], float], failures: Failures
    ) -> None:
        self.network, self.compute = network, compute
        self.traffic = Traffic(network)
        self._uptimes = [Uptime(failures, rank) for rank in range(workers)]
        self.clocks = [0.0] * workers
        self.calls: dict[tuple[Path, str, int], Call] = {}
        self.farewells: dict[int, Departure] = {}
        self.failure: BaseException | None = None
        self.tracks: WeakSet[Track] = WeakSet()  # of all runs
        self.heard: dict[tuple[Path, int], int] = {}  # numbers announced, by sidecar
        self.views: dict[tuple[Path, int], Communicator] = {}
        self.waiting: dict[int, Call | Condition | None] = dict.fromkeys(range(workers))  # None: may run
        self.task_queues: dict[int, list[VirtualQueue]] = {}  # of every actor
        self.current = 0  # who has the baton
        self.understudies: list[threading.Thread] = []
        self.on_exit: dict[int, list[Callable[[], None]]] = {rank: [] for rank in range(workers)}
        self._ranks = list(range(workers))  # of every actor
        self._posts: list[tuple[float, int, Callable[[float], None]]] = []
        self._posted = 0
        self._turns = [_turn() for _ in range(workers)]
        self._rng = [torch.get_rng_state() for _ in range(workers)]

    def begin(self) -> None:
        self._hand_over()

    def entered(self, rank: int) -> Entered:
        return Entered(self, rank)

    def spawn(self, rank: int) -> int:
        """One more actor, for a rank; it is not on the scheduler yet."""
        self.clocks.append(self.clocks[rank])
        self._ranks.append(rank)
        self._turns.append(_turn())
        self._rng.append(torch.get_rng_state())
        return len(self.clocks) - 1

    def play(self, actor: int, work: Callable[[], None]) -> None:
        """Let an actor come on; its time is that of its hiring: it may be called on before its rank is."""

        def run() -> None:
            self.enter(actor)
            work()
            del self.waiting[actor]
            self._hand_over()

        self.waiting[actor] = None
        self.understudies.append(threading.Thread(target=run, daemon=True))
        self.understudies[-1].start()

    def post(self, when: float, deliver: Callable[[float], None]) -> None:
        """Something that happens at a time, in nobody's turn."""
        self._posted += 1
        heapq.heappush(self._posts, (when, self._posted, deliver))

    def computed(self, rank: int, step: int) -> None:
        """The worker's clock moves by a gradient, and by the failures that fell into it."""
        seconds = self.compute(rank, step)
        self.clocks[rank] += seconds + self._uptimes[rank].lost(seconds)

    def wait(self, actor: int, call: Call) -> None:
        """Give the baton away until the call is complete, and move this actor's clock to its landing."""
        task_queues = self.task_queues.get(actor, [])
        if not call.complete and not any(task_queue.busy for task_queue in task_queues):
            for task_queue in task_queues:
                task_queue.catch_up()
        if not call.complete:
            self.waiting[actor] = call
            self.catch_up(actor)
        if call.error is not None:
            raise Disagreement(call.error)
        if not call.complete:
            raise self._why_never(self._ranks[actor], call)
        self.clocks[actor] = max(self.clocks[actor], call.lands)

    def has_landed(self, actor: int, call: Call) -> bool:
        """Whether a message is here by now, once all who are behind in time have caught up."""
        self.catch_up(actor)
        return call.complete and call.lands <= self.clocks[actor]

    def _why_never(self, rank: int, call: Call) -> BaseException:
        what = describe(*call.given[rank][:2])
        for other in call.members:
            if other not in call.given and other in self.farewells:
                return self.farewells[other].error(other, f"the {what}")
        assert self.failure is not None
        return self.failure

    def catch_up(self, actor: int) -> None:
        """Let all go on who are behind in time, or at the same time before this actor."""
        self._rng[actor] = torch.get_rng_state()
        self._hand_over()
        self.enter(actor)

    def enter(self, actor: int) -> None:
        self._turns[actor].acquire()
        self.current = actor
        torch.set_rng_state(self._rng[actor])

    def exit(self, rank: int, error: BaseException | None) -> None:
        if error is not None:
            self.failure = self.failure or error
            self.farewells.setdefault(rank, Departure.of(error))
        del self.waiting[rank]
        self.farewells.setdefault(rank, Departure("has returned"))
        for leave in self.on_exit[rank]:
            leave()
        self._hand_over()

    def _hand_over(self) -> None:
        """The baton goes to the actor that is earliest in time among those who can move."""
        first = self._first()
        while self._posts and (first is None or self._posts[0][0] < first[0]):
            when, _, deliver = heapq.heappop(self._posts)
            deliver(when)
            first = self._first()
        if first is None and self.waiting:
            self.failure = self.failure or self._why_nobody()
            first = min((self.clocks[actor], actor) for actor in self.waiting)
        if first is not None:
            when, actor = first
            self.clocks[actor] = max(self.clocks[actor], when)
            self.waiting[actor] = None
            self._turns[actor].release()

    def _first(self) -> tuple[float, int] | None:
        """Who can move first, and from when on."""
        able = []
        for actor, what in self.waiting.items():
            if isinstance(what, Condition):
                if (due := what.due) is not None:
                    able.append((max(due, self.clocks[actor]), actor))
            elif what is None or self._over(what):
                able.append((self.clocks[actor], actor))
        return min(able, default=None)

    def _over(self, call: Call) -> bool:
        return not call.missing or not call.missing.isdisjoint(self.farewells)

    def _why_nobody(self) -> BaseException:
        """Nobody can move: workers are in different places, or wait for each other."""
        apart = find_disagreement(sorted(self.tracks, key=lambda track: track.rank))
        return Deadlock(self._standstill()) if apart is None else Disagreement(apart)

    def _standstill(self) -> str:
        waits = [
            what.what if isinstance(what, Condition) else self._lacks(rank, what)
            for rank, what in self.waiting.items()
            if what is not None and rank in self.on_exit  # their sidecars wait for them
        ]
        return "Nobody can move: " + "; ".join(waits) + "."

    def _lacks(self, rank: int, call: Call) -> str:
        others = ", ".join(f"rank {other}" for other in call.members if other not in call.given)
        return f"rank {rank} waits for {describe(*call.given[rank][:2])} from {others}"


def _turn() -> threading.Lock:
    """To be acquired when somebody has released it."""
    turn = threading.Lock()
    turn.acquire()
    return turn


class Entered:
    """A worker's time on the scheduler, from its first turn to its return."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self.scheduler, self.rank = scheduler, rank

    def __enter__(self) -> None:
        self.scheduler.enter(self.rank)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.scheduler.exit(self.rank, error)
        return True  # `simulate` raises it in the caller's thread
