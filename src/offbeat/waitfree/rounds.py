"""The engine of wait-free rounds: a worker's sidecar runs numbered rounds in order, each exactly once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock
from offbeat.comm.background import Sidecar
from offbeat.engine.round import Round
from offbeat.reduce import Reducer
from offbeat.waitfree.attendance import GroupReport
from offbeat.waitfree.handover import Handover, sync_device


def is_blocking(round: int, every: int) -> bool:
    """Whether all workers meet in a round: every `every`-th does."""
    return (round + 1) % every == 0


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
    meets: bool  # whether sidecars also run the blocking rounds; otherwise the workers do
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
        for round in itertools.count(self.done + 1):
            self._await(round)
            self._run(round)

    def _await(self, round: int) -> None:
        """Wait until a round may run.

        By default, the sidecar does not wait for a worker that is rounds behind or slower than usual.
        """
        sidecar, handover = self.sidecar, self.handover
        passive = not is_blocking(round, self.every)
        with sidecar.locked():
            sidecar.until(
                lambda: handover.version >= round or (passive and sidecar.heard >= round),
                f"its worker or a call to round {round}",
            )
            patience = self.grace
            if patience is None:
                patience = self.due - sidecar.comm.now() if handover.version == round - 1 else 0.0
            if handover.version < round and patience > 0:
                sidecar.until(lambda: handover.version >= round, f"round {round}", patience)

    def _run(self, number: int) -> None:
        if is_blocking(number, self.every) and not self.meets:
            with self.sidecar.locked():
                self.done = number
            return
        payload, version = self.handover.take()
        comm, mean = self.among.at(number), payload
        round = Round(Clock(step=number + 1, round=number, lr=0.0, workers=comm.size), comm, since=number)
        if comm.size > 1:
            with round.phase("offbeat.group"):
                round.messages = [message := self.reduce.start(payload, round.comm, round.clock, {})]
                mean = message.wait()
        sync_device(payload)
        with self.sidecar.locked():
            self.handover.bring(mean)
            self.newest = GroupReport(**vars(round.report()), kind="fresh", age=number - version)
            self.news.append(self.newest)
            self.done = number
