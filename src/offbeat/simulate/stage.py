"""The workers' threads, of which one runs at a time, the earliest first."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offbeat.comm import Communicator, Farewell
from offbeat.errors import Deadlock, Disagreement
from offbeat.simulate.call import Call, describe
from offbeat.simulate.failures import Failures, Uptime
from offbeat.simulate.network import Network, Traffic

Path = tuple[tuple[int, ...], ...]  # a communicator's members, after those it comes from; below 0: a twin


class Stage:
    """The workers' threads, of which one has the baton and runs; the others wait for a message or a turn."""

    def __init__(
        self, workers: int, network: Network, compute: Callable[[int, int], float], failures: Failures
    ) -> None:
        self.compute = compute
        self.traffic = Traffic(network)
        self._uptimes = [Uptime(failures, rank) for rank in range(workers)]
        self.clocks = [0.0] * workers
        self.calls: dict[tuple[Path, str, int], Call] = {}
        self.farewells: dict[int, Farewell] = {}
        self.failure: BaseException | None = None
        self.views: dict[tuple[Path, int], Communicator] = {}
        self._turns = [threading.Semaphore(0) for _ in range(workers)]
        self._waiting: dict[int, Call | None] = dict.fromkeys(range(workers))  # None: may run
        self._rng = [torch.get_rng_state() for _ in range(workers)]

    def begin(self) -> None:
        self._hand_over()

    def entered(self, rank: int) -> Entered:
        return Entered(self, rank)

    def computed(self, rank: int, step: int) -> None:
        """The worker's clock moves by a gradient, and by the failures that fell into it."""
        seconds = self.compute(rank, step)
        self.clocks[rank] += seconds + self._uptimes[rank].lost(seconds)

    def wait(self, rank: int, call: Call) -> None:
        """Give the baton away until the call is complete, and move this worker's clock to its landing."""
        if not call.complete:
            self._waiting[rank] = call
            self._yield(rank)
        if call.error is not None:
            raise Disagreement(call.error)
        if not call.complete:
            raise self._why_never(rank, call)
        self.clocks[rank] = max(self.clocks[rank], call.lands)

    def has_landed(self, rank: int, call: Call) -> bool:
        """Whether a message is here by now, once all who are behind in time have caught up."""
        self._yield(rank)
        return call.complete and call.lands <= self.clocks[rank]

    def _why_never(self, rank: int, call: Call) -> BaseException:
        what = describe(*call.given[rank][:2])
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

    def _over(self, call: Call) -> bool:
        return not call.missing or not call.missing.isdisjoint(self.farewells)

    def _standstill(self) -> str:
        waits = [
            f"rank {rank} waits for {describe(*call.given[rank][:2])} from "
            + ", ".join(f"rank {other}" for other in call.members if other not in call.given)
            for rank, call in self._waiting.items()
            if call is not None
        ]
        return "Nobody can move: " + "; ".join(waits) + "."


class Entered:
    """A worker's time on the stage, from its first turn to its return."""

    def __init__(self, stage: Stage, rank: int) -> None:
        self.stage, self.rank = stage, rank

    def __enter__(self) -> None:
        self.stage.enter(self.rank)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.stage.exit(self.rank, error)
        return True  # `simulate` raises it in the caller's thread
