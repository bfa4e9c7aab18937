"""Wait-free rounds: a worker's sidecar runs them in order, each exactly once, and notes who was late."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock
from offbeat.comm.background import Sidecar
from offbeat.engine.report import Report
from offbeat.engine.round import Round
from offbeat.reduce import Reducer
from offbeat.waitfree.handover import Handover, sync_device

Kind = Literal["fresh", "late", "nothing new"]
WORDS = ("fresh", "late", "nothing new", "rounds", "ages", "oldest", "microseconds")


@dataclass(frozen=True)
class GroupReport(Report):
    """A round of a group, as this worker saw it.

    "fresh": the mean contains this worker's newest contribution. "late": the round used an older one.
    "nothing new": the worker was so late that it had already used the newest mean at an earlier step.
    """

    kind: Kind
    age: int  # of this worker's contribution to the newest mean, in rounds; 0 if fresh


@dataclass(frozen=True)
class Attendance:
    """The attendance of one worker up to the last global round."""

    rank: int
    fresh: float  # share of its steps, as are `late` and `nothing_new`
    late: float
    nothing_new: float
    age: float  # mean age of its contributions, in rounds
    oldest: int
    waited: float  # seconds spent waiting for rounds of its groups

    @classmethod
    def read(cls, rank: int, words: Sequence[int]) -> Attendance:
        """From the worker's `WORDS`, counted over the whole run."""
        fresh, late, nothing, rounds, ages, oldest, microseconds = words[: len(WORDS)]
        steps, age = max(1, fresh + late + nothing), ages / max(1, rounds)
        return cls(rank, fresh / steps, late / steps, nothing / steps, age, oldest, microseconds / 1e6)


@dataclass(eq=False)
class Rounds:
    """The rounds of one worker, run by its sidecar.

    The number of a round determines its collective. A call to a round therefore only says how far a sidecar
    may go:

        round t may run     once the worker has submitted t
                            or, unless it blocks, once anybody has called for t and `grace` has passed
    """

    sidecar: Sidecar
    handover: Handover
    among: Butterfly | World  # over the sidecar's own connections
    reduce: Reducer
    every: int  # every so many rounds, one blocks
    sidecars: bool  # whether sidecars also run the blocking rounds; otherwise the workers do
    grace: float | None  # seconds to wait for the worker after a call; None: until it is overdue
    due: float  # when the worker is overdue, on its clock

    def __post_init__(self) -> None:
        self.done = self.handover.version
        self.newest: GroupReport | None = None  # of the last round in which the sidecar sent something
        self.news: list[GroupReport] = []  # of such rounds since the worker last looked

    @torch.no_grad()
    def run(self) -> None:
        """Run round after round until the sidecar is stopped."""
        if self.handover.device.type != "cpu":
            # A new thread starts on the first device.
            torch.accelerator.set_device_index(self.handover.device.index)
        for number in itertools.count(self.done + 1):
            blocking = (number + 1) % self.every == 0
            self._await(number, blocking)
            if self.sidecars or not blocking:
                self._run(number)
            else:
                with self.sidecar.locked():
                    self.done = number

    def _await(self, round: int, blocking: bool) -> None:
        """Wait until a round may run.

        By default, the sidecar does not wait for a worker that is rounds behind or slower than usual.
        """
        sidecar, handover = self.sidecar, self.handover
        with sidecar.locked():
            sidecar.until(
                lambda: handover.version >= round or (not blocking and sidecar.heard >= round),
                f"its worker or a call to round {round}",
            )
            patience = self.grace
            if patience is None:
                patience = self.due - sidecar.comm.now() if handover.version == round - 1 else 0.0
            if handover.version < round and patience > 0:
                sidecar.until(lambda: handover.version >= round, f"round {round}", patience)

    def _run(self, number: int) -> None:
        payload, version = self.handover.take()
        comm, mean = self.among.at(number), payload
        round = Round(Clock(step=number + 1, round=number, lr=0.0, workers=comm.size), comm, since=number)
        if comm.size > 1:
            with round.phase("offbeat.group"):
                round.messages = [message := self.reduce.start(payload, round.comm, round.clock, {})]
                mean = message.wait()
        sync_device(mean)
        with self.sidecar.locked():
            self.handover.bring(mean)
            self.newest = GroupReport(**vars(round.report()), kind="fresh", age=number - version)
            self.news.append(self.newest)
            self.done = number
