"""Many workers in one process: deterministic, in virtual time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from offbeat.comm import Communicator, Farewell, Pending, nbytes, sum_in_order, traffic, words
from offbeat.companion import Companion
from offbeat.companion_virtual import Understudy, Until
from offbeat.errors import Deadlock, Disagreement

T = TypeVar("T")


@dataclass(frozen=True)
class Network:
    """Every message takes `latency` seconds plus its bytes over `bandwidth` bytes per second."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency >= 0:
            raise ValueError(f"{self!r}: latency must not be negative.")
        if not self.bandwidth > 0:
            raise ValueError(f"{self!r}: bandwidth must be positive.")

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


def simulate(
    worker: Callable[[Communicator], T],
    workers: int,
    *,
    network: Network | None = None,
    compute: Callable[[int, int], float] | None = None,
) -> list[T]:
    """Run `worker(comm)` for every rank in one process, and return what each returned.

    Exactly one worker runs at a time, and they change places only where one waits for a message, so a run is
    a pure function of its inputs. Each worker has its own state of torch's random numbers, at first the
    caller's.
    `compute(rank, step)` is how many virtual seconds a worker needs for the gradient after `step` iterations.

        def worker(comm):
            model, optimizer, batches = build(comm.rank)
            with offbeat.local_sgd(model, optimizer, every=8, group=comm) as sync:
                for x, y in batches: ...
            return sync.totals
        totals = simulate(worker, workers=4, network=Network(latency=0.02, bandwidth=12.5e6))
    """
    if workers < 1:
        raise ValueError(f"simulate(workers={workers}): workers must be at least 1.")
    rng = torch.get_rng_state()
    stage = _Stage(workers, network or Network(), compute or (lambda rank, step: 0.0))
    results: list[Any] = [None] * workers

    def play(rank: int) -> None:
        with stage.entered(rank):
            results[rank] = worker(stage.member((tuple(range(workers)),), rank))

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    stage.begin()
    for thread in threads:
        thread.join()
    for thread in stage.understudies:
        thread.join()
    torch.set_rng_state(rng)
    if stage.failure is not None:
        raise stage.failure
    return results


class Virtual(Communicator):
    """One simulated worker's view of its peers."""

    def __init__(self, stage: _Stage, path: _Path, me: int, actor: int) -> None:
        self._stage, self._path, self._me, self._actor = stage, path, me, actor
        self._members = path[-1]
        self.rank, self.size = self._members.index(me), len(self._members)
        self._number = {"data": 0, "control": 0}
        self._companions = 0

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            for place in zip(*posts, strict=True):
                total = sum_in_order(place)
                for tensor in place:
                    tensor.copy_(total)
            return posts

        return self._post("mean", list(tensors), settle)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[0].clone() for post in posts] for _ in posts]

        return self._post("gather", [tensor], settle)

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[rank].clone() for post in posts] for rank in range(len(posts))]

        return self._post("exchange", list(chunks), settle)

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            for rank, post in enumerate(posts):
                for tensor, original in zip(post, posts[src], strict=True):
                    if rank != src:
                        tensor.copy_(original)
            return posts

        return self._post("broadcast", list(tensors), settle)

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[0] for post in posts] for _ in posts]

        heard = self._post("gather", [words(numbers)], settle, lane="control")
        return heard.then(lambda parts: [part.tolist() for part in parts])

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        members = tuple(self._members[rank] for rank in mine)
        return self._stage.member((*self._path, members), self._me, self._actor)

    def companion(self) -> Companion:
        self._companions += 1
        path = (*self._path, (-self._companions,), self._members)  # no ranks: no `split` leads there
        return Understudy(self._stage, self._me, path)

    def leave(self, farewell: Farewell) -> None:
        self._stage.farewells.setdefault(self._me, farewell)

    def now(self) -> float:
        return self._stage.clocks[self._actor]

    def computed(self, step: int) -> None:
        self._stage.clocks[self._actor] += self._stage.compute(self._me, step)

    def _post(
        self, kind: str, tensors: list[Tensor], settle: _Settle, lane: str = "data"
    ) -> Pending[list[Tensor]]:
        number = self._number[lane]
        self._number[lane] += 1
        call = self._stage.calls.setdefault((self._path, lane, number), _Call(self._members))
        call.post(self._me, kind, tensors, self.now())
        if call.complete:
            del self._stage.calls[self._path, lane, number]
            call.settle(settle, self._stage.network)

        def wait() -> list[Tensor]:
            self._stage.wait(self._actor, call)
            return call.results[self.rank]

        return Pending(wait, lambda: self._stage.has_landed(self._actor, call), lambda: call.lands)


_Settle = Callable[[list[list[Tensor]]], list[list[Tensor]]]
_Path = tuple[tuple[int, ...], ...]  # a communicator's members, after those of all it was split from


@dataclass
class _Call:
    """One collective: what its members gave, and when its result lands."""

    members: tuple[int, ...]
    given: dict[int, tuple[str, list[Tensor], float]] = field(default_factory=dict)
    results: list[list[Tensor]] = field(default_factory=list)
    lands: float = 0.0
    error: str | None = None

    @property
    def complete(self) -> bool:
        return len(self.given) == len(self.members)

    def post(self, rank: int, kind: str, tensors: list[Tensor], when: float) -> None:
        self.given[rank] = (kind, tensors, when)

    def settle(self, settle: _Settle, network: Network) -> None:
        said = {rank: _describe(*self.given[rank][:2]) for rank in self.members}
        first = self.members[0]
        for rank in self.members:
            if said[rank] != said[first]:
                self.error = f"Workers disagree: rank {first} sends {said[first]}, rank {rank} {said[rank]}."
                return
        with torch.no_grad():
            self.results = settle([self.given[rank][1] for rank in self.members])
        kind, tensors, _ = self.given[first]
        cost = network.seconds(traffic(kind, len(self.members), nbytes(tensors)))
        self.lands = max(when for _, _, when in self.given.values()) + cost


def _describe(kind: str, tensors: list[Tensor]) -> str:
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
    return f"{kind} of {shapes}"


class _Stage:
    """The workers' threads, of which one has the baton and runs; the others wait for a message or a turn.

    An actor is a thread: those of the ranks come first, their companions after them. At the same virtual time
    ranks act before companions, and in their order.
    """

    def __init__(self, workers: int, network: Network, compute: Callable[[int, int], float]) -> None:
        self.network, self.compute = network, compute
        self.clocks = [0.0] * workers
        self.calls: dict[tuple[_Path, str, int], _Call] = {}
        self.farewells: dict[int, Farewell] = {}
        self.failure: BaseException | None = None
        self.waiting: dict[int, _Call | Until | None] = dict.fromkeys(range(workers))  # None: may run
        self.current = 0  # who has the baton
        self.understudies: list[threading.Thread] = []
        self.on_exit: dict[int, list[Callable[[], None]]] = {rank: [] for rank in range(workers)}
        self.heard: dict[tuple[_Path, int], int] = {}
        self._ranks = list(range(workers))  # of every actor
        self._posts: list[tuple[float, int, Callable[[float], None]]] = []
        self._posted = 0
        self._views: dict[tuple[_Path, int], Virtual] = {}
        self._turns = [threading.Semaphore(0) for _ in range(workers)]
        self._rng = [torch.get_rng_state() for _ in range(workers)]

    def member(self, path: _Path, me: int, actor: int | None = None) -> Virtual:
        """The one view `me` has of this communicator: its messages are numbered there."""
        view = Virtual(self, path, me, me if actor is None else actor)
        return self._views.setdefault((path, me), view)

    def hire(self, rank: int) -> int:
        """One more actor, for a rank; it is not on the stage yet."""
        self.clocks.append(self.clocks[rank])
        self._ranks.append(rank)
        self._turns.append(threading.Semaphore(0))
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

    def begin(self) -> None:
        self._hand_over()

    def entered(self, rank: int) -> _Entered:
        return _Entered(self, rank)

    def wait(self, actor: int, call: _Call) -> None:
        """Give the baton away until the call is complete, and move this worker's clock to its landing."""
        if not call.complete:
            self.waiting[actor] = call
            self.catch_up(actor)
        if call.error is not None:
            raise Disagreement(call.error)
        if not call.complete:
            raise self._why_never(self._ranks[actor], call)
        self.clocks[actor] = max(self.clocks[actor], call.lands)

    def has_landed(self, actor: int, call: _Call) -> bool:
        """Whether a message is here by now, once all who are behind in time have caught up."""
        self.catch_up(actor)
        return call.complete and call.lands <= self.clocks[actor]

    def _why_never(self, rank: int, call: _Call) -> BaseException:
        what = _describe(*call.given[rank][:2])
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
            self.farewells.setdefault(rank, Farewell.of(error))
        del self.waiting[rank]
        self.farewells.setdefault(rank, Farewell("has returned"))
        for leave in self.on_exit[rank]:
            leave()
        self._hand_over()

    def _hand_over(self) -> None:
        """The baton goes to the actor that is earliest in time among those who can move."""
        able = self._able()
        while self._posts and (not able or self._posts[0][0] < able[0][0]):
            when, _, deliver = heapq.heappop(self._posts)
            deliver(when)
            able = self._able()
        if not able and self.waiting:
            self.failure = self.failure or Deadlock(self._standstill())
            able = sorted((self.clocks[actor], actor) for actor in self.waiting)
        if able:
            when, actor = able[0]
            self.clocks[actor] = max(self.clocks[actor], when)
            self.waiting[actor] = None
            self._turns[actor].release()

    def _able(self) -> list[tuple[float, int]]:
        """From when on each actor can move, the earliest first."""
        times = []
        for actor, what in self.waiting.items():
            if isinstance(what, Until):
                if (due := what.due) is not None:
                    times.append((max(due, self.clocks[actor]), actor))
            elif what is None or self._over(what):
                times.append((self.clocks[actor], actor))
        return sorted(times)

    def _over(self, call: _Call) -> bool:
        gone = any(rank in self.farewells for rank in call.members if rank not in call.given)
        return call.complete or gone

    def _standstill(self) -> str:
        waits = [
            what.what
            if isinstance(what, Until)
            else f"rank {self._ranks[actor]} waits for {_describe(*what.given[self._ranks[actor]][:2])} from "
            + ", ".join(f"rank {other}" for other in what.members if other not in what.given)
            for actor, what in self.waiting.items()
            if what is not None and actor < len(self.on_exit)
        ]
        return "Nobody can move: " + "; ".join(waits) + "."


class _Entered:
    """A worker's time on the stage, from its first turn to its return."""

    def __init__(self, stage: _Stage, rank: int) -> None:
        self.stage, self.rank = stage, rank

    def __enter__(self) -> None:
        self.stage.enter(self.rank)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.stage.exit(self.rank, error)
        return True  # `simulate` raises it in the caller's thread
