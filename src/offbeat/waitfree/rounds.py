"""The engine: numbered rounds that a worker's sidecar runs strictly in order, each exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import record_function

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock
from offbeat.base.errors import PeerLost
from offbeat.base.packed import Packed
from offbeat.comm.background import Sidecar
from offbeat.comm.communicator import Communicator, Metered
from offbeat.reduce import Reducer


class Load(Protocol):
    """What a worker and its sidecar hand to each other."""

    device: torch.device  # where it lies

    def take(self, round: int) -> tuple[Packed, int]:
        """In the sidecar: what is sent in a round, and the round in which the worker had made it."""

    def bring(self, mean: Packed) -> None:
        """In the sidecar, what is shared being locked: the mean is here."""

    def fetch(self, outcome: Outcome) -> None:
        """In the worker, what is shared being locked: it is about to use this outcome."""


@dataclass(frozen=True)
class Timetable:
    """With whom each round is held, and which are blocking: functions of its number alone."""

    every: int  # so many rounds to a blocking one
    among: Butterfly | World  # on the sidecar's own connections
    sidecars: bool  # whether sidecars hold the blocking rounds too; else the workers themselves do

    def blocking(self, round: int) -> bool:
        return (round + 1) % self.every == 0

    def among_whom(self, round: int) -> Communicator | None:
        """None: sidecars send nothing."""
        return None if self.blocking(round) and not self.sidecars else self.among.at(round)


@dataclass(frozen=True)
class Outcome:
    """The last round that was run."""

    round: int
    version: int  # the round in which the worker made what it contributed
    workers: int
    mean: Packed | None  # None where a worker was alone


@dataclass
class Cost:
    """What rounds have cost since the last report."""

    sent: int = 0
    received: int = 0
    in_air: float = 0.0


class Rounds:
    """Rounds first, first + 1, … of one worker.

    Since the number of a round says all about it, a call to a round never says which collective to run, only
    how far a sidecar may go:

        round t may run     once the worker has submitted t
                            or, unless it is blocking, once anybody has called to t, and `grace` has passed
    """

    def __init__(
        self,
        sidecar: Sidecar,
        load: Load,
        *,
        first: int,
        reduce: Reducer,
        timetable: Timetable,
    ) -> None:
        self.sidecar, self.load = sidecar, load
        self.grace: float | None = None  # seconds after a call; None: until the worker is overdue
        self.due = 0.0  # when it will be overdue, on its clock
        self.submitted = self.done = first - 1
        self.outcome: Outcome | None = None
        self.cost = Cost()
        self.ages: list[int] = []  # of what was contributed since the last report
        self._first, self._reduce, self._timetable = first, reduce, timetable

    def start(self) -> None:
        self.sidecar.start(self._work)

    def submit(self, round: int, publish: Callable[[], None], *, call: bool) -> None:
        """In the worker: what was made for a round becomes the newest; `call` the others to it."""
        with self.sidecar.locked():
            publish()
            self.submitted = round
            if call and self.sidecar.heard < round:
                self.sidecar.announce(round)

    def wait(self, round: int) -> Outcome:
        """In the worker: the newest round, once this one is done."""
        with self.sidecar.locked():
            self.sidecar.until(lambda: self.done >= round, f"round {round}")
            assert self.outcome is not None
            self.load.fetch(self.outcome)
            return self.outcome

    def collect(self) -> tuple[Cost, list[int]]:
        """What the rounds since the last call have cost, and how old this worker's contributions were."""
        with self.sidecar.locked():
            cost, ages = self.cost, self.ages
            self.cost, self.ages = Cost(), []
        return cost, ages

    def stop(self) -> None:
        self.sidecar.stop()

    @torch.no_grad()
    def _work(self) -> None:
        if self.load.device.type != "cpu":
            torch.accelerator.set_device_index(self.load.device.index)  # a new thread begins with the first
        for round in itertools.count(self._first):
            self._await(round)
            try:
                self._run(round)
            except PeerLost as error:
                raise error.during(round, round + 1) from error.__cause__

    def _await(self, round: int) -> None:
        sidecar = self.sidecar
        with sidecar.locked():
            passive = not self._timetable.blocking(round)
            sidecar.until(
                lambda: self.submitted >= round or (passive and sidecar.heard >= round),
                f"its worker or a call to round {round}",
            )
            patience = self._patience(round)
            if self.submitted < round and patience > 0:
                sidecar.until(lambda: self.submitted >= round, f"round {round}", patience)

    def _patience(self, round: int) -> float:
        """How many seconds to wait for one's own worker, which others wait along for.

        A worker that is rounds behind is not worth waiting for, nor one that takes longer than usual.
        """
        if self.grace is not None:
            return self.grace
        return self.due - self.sidecar.comm.now() if self.submitted == round - 1 else 0.0

    def _run(self, round: int) -> None:
        comm = self._timetable.among_whom(round)
        if comm is None:
            with self.sidecar.locked():
                self.done = round
            return
        payload, version = self.load.take(round)
        metered, began = Metered(comm), comm.now()
        mean = None
        if comm.size > 1:
            clock = Clock(step=round + 1, round=round, lr=0.0, workers=comm.size)
            with record_function("offbeat.group"):
                mean = self._reduce.start(payload, metered, clock, {}).wait()
        sync_device(payload)
        with self.sidecar.locked():
            self.load.bring(payload if mean is None else mean)
            self.outcome, self.done = Outcome(round, version, comm.size, mean), round
            self.cost.sent += metered.sent
            self.cost.received += metered.received
            self.cost.in_air += comm.now() - began
            self.ages.append(round - version)


def sync_device(packed: Packed) -> None:
    """What was asked of a device is done: the other thread may use another of its streams."""
    for device in {flat.device for flat in packed.flats}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
