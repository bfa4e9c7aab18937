"""Many workers in one process: deterministic, in virtual time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from offbeat.comm import Communicator, Farewell, Pending, nbytes, sum_in_order, traffic, words
from offbeat.courier import Courier, Lazy
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
    torch.set_rng_state(rng)
    if stage.failure is not None:
        raise stage.failure
    return results


class Virtual(Communicator):
    """One simulated worker's view of its peers."""

    def __init__(self, stage: _Stage, path: _Path, me: int) -> None:
        self._stage, self._path, self._me = stage, path, me
        self._members = path[-1]
        self.rank, self.size = self._members.index(me), len(self._members)
        self._number = {"data": 0, "control": 0}
        self._twins = 0

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

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[posts[rank - 1][0].clone()] for rank in range(len(posts))]

        return self._post("shift", [tensor], settle).then(lambda got: got[0])

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        def settle(posts: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[post[0] for post in posts] for _ in posts]

        heard = self._post("gather", [words(numbers)], settle, lane="control")
        return heard.then(lambda parts: [part.tolist() for part in parts])

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        members = tuple(self._members[rank] for rank in mine)
        return self._stage.member((*self._path, members), self._me)

    def twin(self) -> Communicator:
        self._twins += 1
        return self._stage.member((*self._path, (-self._twins,), self._members), self._me)

    def courier(self) -> Courier:
        made = Lazy(self.now, functools.partial(self._stage.clocks.__setitem__, self._me))
        self._stage.couriers[self._me].append(made)
        return made

    def leave(self, farewell: Farewell) -> None:
        self._stage.farewells.setdefault(self._me, farewell)

    def now(self) -> float:
        return self._stage.clocks[self._me]

    def computed(self, step: int) -> None:
        self._stage.clocks[self._me] += self._stage.compute(self._me, step)

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
            self._stage.wait(self._me, call)
            return call.results[self.rank]

        return Pending(wait, lambda: self._stage.has_landed(self._me, call), lambda: call.lands)


_Settle = Callable[[list[list[Tensor]]], list[list[Tensor]]]
_Path = tuple[tuple[int, ...], ...]  # a communicator's members, after those it comes from; below 0: a twin


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
    """The workers' threads, of which one has the baton and runs; the others wait for a message or a turn."""

    def __init__(self, workers: int, network: Network, compute: Callable[[int, int], float]) -> None:
        self.network, self.compute = network, compute
        self.clocks = [0.0] * workers
        self.calls: dict[tuple[_Path, str, int], _Call] = {}
        self.farewells: dict[int, Farewell] = {}
        self.failure: BaseException | None = None
        self.couriers: list[list[Lazy]] = [[] for _ in range(workers)]
        self._views: dict[tuple[_Path, int], Virtual] = {}
        self._turns = [threading.Semaphore(0) for _ in range(workers)]
        self._waiting: dict[int, _Call | None] = dict.fromkeys(range(workers))  # None: may run
        self._rng = [torch.get_rng_state() for _ in range(workers)]

    def member(self, path: _Path, me: int) -> Virtual:
        """The one view `me` has of this communicator: its messages are numbered there."""
        return self._views.setdefault((path, me), Virtual(self, path, me))

    def begin(self) -> None:
        self._hand_over()

    def entered(self, rank: int) -> _Entered:
        return _Entered(self, rank)

    def wait(self, rank: int, call: _Call) -> None:
        """Give the baton away until the call is complete, and move this worker's clock to its landing."""
        for courier in self.couriers[rank] if not call.complete else []:
            courier.catch_up()
        if not call.complete:
            self._waiting[rank] = call
            self._yield(rank)
        if call.error is not None:
            raise Disagreement(call.error)
        if not call.complete:
            raise self._why_never(rank, call)
        self.clocks[rank] = max(self.clocks[rank], call.lands)

    def has_landed(self, rank: int, call: _Call) -> bool:
        """Whether a message is here by now, once all who are behind in time have caught up."""
        self._yield(rank)
        return call.complete and call.lands <= self.clocks[rank]

    def _why_never(self, rank: int, call: _Call) -> BaseException:
        what = _describe(*call.given[rank][:2])
        for other in call.members:
            if other not in call.given and other in self.farewells:
                return self.farewells[other].error(other, f"the {what}")
        assert self.failure is not None
        return self.failure

    def _yield(self, rank: int) -> None:
        self._rng[rank] = torch.get_rng_state()
        self._hand_over()
        self.enter(rank)

    def enter(self, rank: int) -> None:
        self._turns[rank].acquire()
        torch.set_rng_state(self._rng[rank])

    def exit(self, rank: int, error: BaseException | None) -> None:
        if error is not None:
            self.failure = self.failure or error
            self.farewells.setdefault(rank, Farewell.of(error))
        del self._waiting[rank]
        self.farewells.setdefault(rank, Farewell("has returned"))
        self._hand_over()

    def _hand_over(self) -> None:
        """The baton goes to the worker that is earliest in time among those who can move."""
        able = [rank for rank, call in self._waiting.items() if call is None or self._over(call)]
        if not able and self._waiting:
            self.failure = self.failure or Deadlock(self._standstill())
            able = list(self._waiting)
        if able:
            rank = min(able, key=lambda rank: (self.clocks[rank], rank))
            self._waiting[rank] = None
            self._turns[rank].release()

    def _over(self, call: _Call) -> bool:
        gone = any(rank in self.farewells for rank in call.members if rank not in call.given)
        return call.complete or gone

    def _standstill(self) -> str:
        waits = [
            f"rank {rank} waits for {_describe(*call.given[rank][:2])} from "
            + ", ".join(f"rank {other}" for other in call.members if other not in call.given)
            for rank, call in self._waiting.items()
            if call is not None
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
