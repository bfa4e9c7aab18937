"""The engine of wait-free rounds: a worker's sidecar runs numbered rounds in order, each exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock
from offbeat.base.errors import PeerLost
from offbeat.comm.background import Sidecar
from offbeat.comm.communicator import Communicator, Metered
from offbeat.reduce import Reducer
from offbeat.waitfree.handover import Handover, sync_device


def is_blocking(round: int, every: int) -> bool:
    """Whether all workers meet in a round: every `every`-th does."""
    return (round + 1) % every == 0


@dataclass(frozen=True)
class Timetable:
    """Who takes part in each round, and which rounds block: functions of the round's number alone."""

    every: int  # every so many rounds, one blocks
    among: Butterfly | World  # over the sidecar's own connections
    sidecars: bool  # whether sidecars also run the blocking rounds; otherwise the workers do

    def peers_at(self, round: int) -> Communicator | None:
        """Whom the sidecar communicates with; None if it sends nothing in this round."""
        return None if is_blocking(round, self.every) and not self.sidecars else self.among.at(round)


@dataclass(frozen=True)
class Outcome:
    """The last completed round."""

    round: int
    version: int  # the round for which the worker made its contribution
    workers: int


@dataclass
class Cost:
    """What the rounds since the last report cost."""

    sent: int = 0
    received: int = 0
    in_air: float = 0.0
    ages: list[int] = field(default_factory=list)  # of this worker's contributions


class Rounds:
    """Rounds first, first + 1, … of one worker.

    The number of a round determines its collective. A call to a round therefore only says how far a sidecar
    may go:

        round t may run     once the worker has submitted t
                            or, unless it blocks, once anybody has called for t and `grace` has passed
    """

    def __init__(
        self,
        sidecar: Sidecar,
        handover: Handover,
        *,
        first: int,
        reduce: Reducer,
        timetable: Timetable,
        grace: float | None,
    ) -> None:
        self.sidecar, self.handover = sidecar, handover
        self.grace = grace  # seconds to wait for the worker after a call; None: until it is overdue
        self.due = 0.0  # when the worker is overdue, on its clock
        self.submitted = self.done = first - 1
        self.outcome: Outcome | None = None
        self.cost = Cost()
        self._first, self._reduce, self._timetable = first, reduce, timetable

    def submit(self, round: int, publish: Callable[[], None], *, call: bool) -> None:
        """In the worker: publish its contribution to a round, and `call` the other workers."""
        with self.sidecar.locked():
            publish()
            self.submitted = round
            if call and self.sidecar.heard < round:
                self.sidecar.announce(round)

    def wait(self, round: int) -> Outcome:
        """In the worker: wait for a round. Returns the newest one, which may be later."""
        with self.sidecar.locked():
            self.sidecar.until(lambda: self.done >= round, f"round {round}")
            assert self.outcome is not None
            self.handover.fetch()
            return self.outcome

    def collect(self) -> Cost:
        """What the rounds since the last call cost."""
        with self.sidecar.locked():
            cost, self.cost = self.cost, Cost()
        return cost

    @torch.no_grad()
    def run(self) -> None:
        """In the sidecar: run round after round until it is stopped."""
        if self.handover.device.type != "cpu":
            # A new thread starts on the first device.
            torch.accelerator.set_device_index(self.handover.device.index)
        for round in itertools.count(self._first):
            self._await(round)
            try:
                self._run(round)
            except PeerLost as error:
                raise error.during(round, round + 1) from error.__cause__

    def _await(self, round: int) -> None:
        sidecar = self.sidecar
        with sidecar.locked():
            passive = not is_blocking(round, self._timetable.every)
            sidecar.until(
                lambda: self.submitted >= round or (passive and sidecar.heard >= round),
                f"its worker or a call to round {round}",
            )
            patience = self._patience(round)
            if self.submitted < round and patience > 0:
                sidecar.until(lambda: self.submitted >= round, f"round {round}", patience)

    def _patience(self, round: int) -> float:
        """How many seconds to wait for the own worker while the others wait too.

        By default, a worker that is rounds behind or slower than usual is not waited for.
        """
        if self.grace is not None:
            return self.grace
        return self.due - self.sidecar.comm.now() if self.submitted == round - 1 else 0.0

    def _run(self, round: int) -> None:
        comm = self._timetable.peers_at(round)
        if comm is None:
            with self.sidecar.locked():
                self.done = round
            return
        payload, version = self.handover.take()
        metered, began, mean = Metered(comm), comm.now(), payload
        if comm.size > 1:
            clock = Clock(step=round + 1, round=round, lr=0.0, workers=comm.size)
            with record_function("offbeat.group"):
                mean = self._reduce.start(payload, metered, clock, {}).wait()
        sync_device(payload)
        with self.sidecar.locked():
            self.handover.bring(mean)
            self.outcome, self.done = Outcome(round, version, comm.size), round
            self.cost.sent += metered.sent
            self.cost.received += metered.received
            self.cost.in_air += comm.now() - began
            self.cost.ages.append(round - version)
