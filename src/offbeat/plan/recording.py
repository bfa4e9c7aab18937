"""A communicator without other workers that records the messages and waits of a real run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from offbeat.comm.background import Sidecar, TaskQueue
from offbeat.comm.collective import Collective, nbytes
from offbeat.comm.communicator import Communicator, Pending, Worker
from offbeat.comm.presence import Departure

T = TypeVar("T")
Name = tuple[int, int]  # the step in which a message is sent (in a period, how many ago), its place there


@dataclass(frozen=True)
class Size:
    """Bytes of a message: a fixed part, and a part divided by the number of workers."""

    whole: float
    cut: float = 0.0

    def at(self, workers: int) -> int:
        return round(max(0.0, self.whole + self.cut / workers))


@dataclass(frozen=True)
class Sent:
    """A message was sent."""

    name: Name
    kind: str
    size: int  # workers that take part
    given: Size
    control: bool  # a few bytes that do not queue
    everyone: bool  # whether all workers take part


@dataclass(frozen=True)
class Waited:
    """A message was waited for."""

    name: Name


COMPUTED = Waited((-1, -1))  # for a gradient


@dataclass(frozen=True)
class QueuedJob:
    """A job was given to a task queue, which runs one job after the other in the background."""

    name: Name
    task_queue: int  # which of the worker's
    events: "Events"


@dataclass(frozen=True)
class Repeated:
    """The same events several times in a row, such as messages that go around a ring."""

    times: int
    events: "Events"


Event = Sent | Waited | QueuedJob | Repeated
Events = tuple[Event, ...]


def count_sent(events: Sequence[Event], times: int = 1) -> Iterator[tuple[Sent, int]]:
    """Yield all messages, including those of task queues, and how often each is sent."""
    for event in events:
        if isinstance(event, Sent):
            yield event, times
        elif isinstance(event, QueuedJob | Repeated):
            yield from count_sent(event.events, times * (event.times if isinstance(event, Repeated) else 1))


@dataclass
class Log:
    """The events of one worker, in order."""

    events: list[Event] = field(default_factory=list)
    step: int = 0
    sent: int = 0  # in this step
    queues: int = 0

    def next_name(self) -> Name:
        self.sent += 1
        return self.step, self.sent

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self.events = self.events, []
        return taken


class RecordingComm(Communicator, Worker):
    """Rank 0 among `size` workers that all send the same tensors."""

    rank = 0

    def __init__(self, size: int, log: Log | None = None, groups: list[list[int]] | None = None) -> None:
        self.size, self.log, self.groups = size, log or Log(), groups  # no groups: everyone
        self._children: dict[tuple[int, ...], RecordingComm] = {}

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        log, name, given = self.log, self.log.next_name(), list(tensors)
        sent = Sent(name, kind.name, self.size, Size(nbytes(given)), control, self.groups is None)
        log.events.append(sent)

        def wait() -> list[Tensor]:
            log.events.append(Waited(name))
            if control:
                return given * self.size  # words are only read, so that 100 000 need no copies
            with torch.no_grad():
                return kind.deliver(given, kind.results([given] * self.size, src, [self.rank])[0])

        # Never done before the wait: a worker that polls learns of the arrival later, as in a real run.
        return Pending(wait, lambda: False, lambda: 0.0)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(tuple(group) for group in groups if self.rank in group)
        child = self._children.setdefault(mine, RecordingComm(len(mine), self.log))
        child.groups = [list(group) for group in groups]
        return child

    @property
    def worker(self) -> Worker:
        return self

    def duplicate(self) -> Communicator:
        return RecordingComm(self.size, self.log, self.groups)

    def task_queue(self) -> TaskQueue:
        return RecordingQueue(self.log)

    def sidecar(self) -> Sidecar:
        return IdleSidecar(self.duplicate())

    def leave(self, departure: Departure) -> None:
        pass

    def now(self) -> float:
        return 0.0

    def computed(self, step: int, share: float = 1.0) -> None:
        self.log.events.append(COMPUTED)
        self.log.step, self.log.sent = self.log.step + 1, 0


class RecordingQueue(TaskQueue):
    """Runs jobs at once and records what they send and wait for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log, self._number = log, log.queues
        log.queues += 1

    def give(self, job: Callable[[], T]) -> Pending[T]:
        log, name, before = self._log, self._log.next_name(), self._log.take()
        result = self._do(job)
        log.events = [*before, QueuedJob(name, self._number, tuple(log.events))]

        def wait() -> T:
            log.events.append(Waited(name))
            return result

        return Pending(wait, lambda: False, lambda: 0.0)


class IdleSidecar(Sidecar):
    """Never starts: the planner works out what sidecars do."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    heard_from = start = locked = until = announce = check = stop = _refuse
