"""Wait-free rounds, which a worker's sidecar runs in order, and the memory that both share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from offbeat.among import Butterfly, World
from offbeat.base.clock import Clock
from offbeat.base.packed import Packed
from offbeat.comm.background import Sidecar
from offbeat.comm.communicator import Metered
from offbeat.engine.report import Report
from offbeat.engine.round import Round
from offbeat.reduce import Reducer

if TYPE_CHECKING:
    from offbeat.waitfree.wait_rules import WaitRule

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

    @property
    def late(self) -> bool:  # type: ignore[override]
        return self.kind != "fresh"


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


def sync_device(packed: Packed) -> None:
    """Wait for queued device work: the other thread may use another stream."""
    for device in {flat.device for flat in packed.flats}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


class Handover:
    """Four copies of the tensors: two that the worker sends from, two that the sidecar receives into.

    Each pair is a double buffer, so one copy can be written while the other is read. The worker calls
    `publish` and `fetch`, and the sidecar calls `bring`, with the sidecar's lock held; the other calls take
    the lock themselves. This one sends the newest snapshot of the weights, and a late worker joins the mean
    as one extra member; subclasses combine unsent and received tensors in other ways.
    """

    def __init__(self, tensors: Mapping[str, Tensor], version: int, sidecar: Sidecar) -> None:
        self.device = next(iter(tensors.values())).device
        self.version = version  # the round of the worker's newest contribution
        self._sidecar = sidecar
        self._draft, self._published, self._result, self._spare = (Packed.like(tensors) for _ in range(4))
        self._reading: Packed | None = None  # the result that the worker is reading

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, before `publish`: these are the tensors after its step."""
        self._draft.read(tensors)
        sync_device(self._draft)

    def reset(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, instead of `write`: all workers have these tensors, as after a global round."""
        self.write(tensors)

    def publish(self) -> None:
        """In the worker, which then sets `version`: what it wrote is its newest contribution."""
        self._draft, self._published = self._published, self._draft

    def take(self) -> tuple[Packed, int]:
        """In the sidecar: the tensors to send, and the round the worker made them for."""
        with self._sidecar.locked():
            # The worker may still be reading the copy that is due for reuse.
            self._sidecar.until(lambda: self._reading is not self._spare, "a result to be read")
            self._collect()
            sync_device(self._spare)
            return self._spare, self.version

    def _collect(self) -> None:
        """Fill `_spare` with what to send."""
        torch._foreach_copy_(self._spare.flats, self._published.flats)

    def bring(self, mean: Packed) -> None:
        """In the sidecar: the mean becomes the newest result."""
        self._result, self._spare = mean, self._result

    def fetch(self) -> None:
        """In the worker: it is about to read the newest result."""
        self._reading = self._result

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        """In the worker, after `fetch`: combine its tensors with the result of `workers` contributions.

        `late`: its own contribution was an older one. A result that it has used before counts one worker.
        """
        assert self._reading is not None
        if workers > 1 and not late:
            self._reading.write(tensors)
        elif workers > 1:
            for x, mean in zip(tensors, self._reading.views, strict=True):
                x.copy_((workers * mean + x) / (workers + 1))
        self._end_reading(self._reading)

    def _end_reading(self, used: Packed) -> None:
        """Once the device is done with `used`, the next round may overwrite the result."""
        sync_device(used)
        with self._sidecar.locked():
            self._reading = None


class AddSteps(Handover):
    """Keeps the worker's weights in the sidecar and adds each step to them, however late it comes.

    A round replaces the kept weights by the group's mean. The sum over all workers therefore never changes
    in a round, and each step enters it exactly once. The kept weights are `_result`; `_published` holds the
    steps that are not in them yet; `_draft` holds the start of the current step, and then the step itself.
    """

    _written = _unsent = False  # whether `_draft`, and `_published`, hold a step

    def reset(self, tensors: Sequence[Tensor]) -> None:
        """The sidecar runs no round meanwhile."""
        self._unsent = False
        for packed in (self._result, self._draft):
            packed.read(tensors)
            sync_device(packed)

    def write(self, tensors: Sequence[Tensor]) -> None:
        for start, now in zip(self._draft.views, tensors, strict=True):
            torch.sub(now.to(start.dtype), start, out=start)
        sync_device(self._draft)
        self._written = True

    def publish(self) -> None:
        if self._written and self._unsent:
            torch._foreach_add_(self._published.flats, self._draft.flats)
            sync_device(self._published)
        elif self._written:
            self._published, self._draft, self._unsent = self._draft, self._published, True
        self._written = False

    def _collect(self) -> None:
        torch._foreach_copy_(self._spare.flats, self._result.flats)
        if self._unsent:
            torch._foreach_add_(self._spare.flats, self._published.flats)
        self._unsent = False

    def fetch(self) -> None:
        super().fetch()
        if self._unsent:
            torch._foreach_copy_(self._draft.flats, self._published.flats)
        else:
            torch._foreach_zero_(self._draft.flats)

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        assert self._reading is not None
        torch._foreach_add_(self._draft.flats, self._reading.flats)
        self._draft.write(tensors)
        self._end_reading(self._draft)


class SumGradients(Handover):
    """Unsent gradients add up for the sidecar, received means for the worker. Each is used once."""

    def write(self, tensors: Sequence[Tensor]) -> None:
        self._written = list(tensors)  # `publish` adds them, since the sidecar may empty the draft meanwhile

    def publish(self) -> None:
        torch._foreach_add_(self._draft.views, self._written)
        sync_device(self._draft)
        self._written = []

    def take(self) -> tuple[Packed, int]:
        with self._sidecar.locked():
            self._draft, self._published = self._published, self._draft
            torch._foreach_zero_(self._draft.flats)
            return self._published, self.version

    def bring(self, mean: Packed) -> None:
        torch._foreach_add_(self._result.flats, mean.flats)
        sync_device(self._result)

    def fetch(self) -> None:
        self._result, self._spare = self._spare, self._result
        torch._foreach_zero_(self._result.flats)

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        self._spare.write(tensors)


@dataclass(eq=False)
class Rounds:
    """The rounds of one worker, run by its sidecar.

    The number of a round determines its collective, so the rules only say how far a sidecar may go.
    `wait_rules` are those for rounds that do not block and for rounds that do.
    """

    sidecar: Sidecar
    handover: Handover
    among: Butterfly | World  # over the sidecar's own connections
    reduce: Reducer
    every: int  # the number of rounds from one that blocks to the next
    sidecars: bool  # whether sidecars also run the blocking rounds; otherwise the workers do
    wait_rules: tuple[WaitRule, WaitRule]
    due: float  # when the worker is overdue, on its clock

    def __post_init__(self) -> None:
        self.done = self.handover.version
        self.first, self.began = self.done + 1, self.sidecar.comm.now()  # of the current round
        self.aside = Metered(self.sidecar.comm)  # carries messages before a round, which its report counts
        self.newest: GroupReport | None = None  # of the last round in which the sidecar sent something
        self.news: list[GroupReport] = []  # of such rounds since the worker last looked

    @torch.no_grad()
    def run(self) -> None:
        """Run round after round until the sidecar is stopped."""
        if self.handover.device.type != "cpu":
            # A new thread starts on the first device.
            torch.accelerator.set_device_index(self.handover.device.index)
        for number in itertools.count(self.first):
            blocking = (number + 1) % self.every == 0
            self.wait_rules[blocking].wait(self, number)
            if self.sidecars or not blocking:
                self._run(number)
            else:
                with self.sidecar.locked():
                    self.done = number

    def _run(self, number: int) -> None:
        payload, version = self.handover.take()
        comm, mean = self.among.at(number), payload
        round = Round(Clock(step=number + 1, round=number, lr=0.0, workers=comm.size), comm, since=number)
        if comm.size > 1:
            with round.phase("offbeat.group"):
                round.messages = [message := self.reduce.start(payload, round.comm, round.clock, {})]
                mean = message.wait()
        sync_device(mean)
        self.aside.move(round.comm)
        with self.sidecar.locked():
            self.newest = GroupReport(**vars(round.report()), kind="fresh", age=number - version)
            self.news.append(self.newest)
            self.handover.bring(mean)
            self.done, self.began = number, self.sidecar.comm.now()
