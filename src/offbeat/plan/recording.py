"""A communicator without other workers that records the messages and waits of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from offbeat.comm.background import Sidecar, TaskQueue
from offbeat.comm.collective import Collective, nbytes
from offbeat.comm.communicator import Communicator, Pending, Worker
from offbeat.comm.presence import Departure

T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    """A message was sent."""

    number: int
    kind: str
    size: int  # workers that take part
    given: int  # bytes
    control: bool  # a few bytes that do not queue
    everyone: bool  # whether all workers take part


@dataclass(frozen=True)
class Waited:
    """A message was waited for."""

    number: int


@dataclass(frozen=True)
class Computed:
    """A gradient was ready."""

    step: int


@dataclass(frozen=True)
class Beside:
    """A job was given to a task queue, which sends and waits beside the worker, one job after the other."""

    number: int
    task_queue: int  # which of the worker's
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Repeated:
    """The same events several times in a row, such as messages that pass round a ring."""

    times: int
    events: tuple[Event, ...]


Event = Sent | Waited | Computed | Beside | Repeated


def sent_in(events: Sequence[Event]) -> list[Sent]:
    """All messages, including those of task queues."""
    found: list[Sent] = []
    for event in events:
        if isinstance(event, Sent):
            found.append(event)
        elif isinstance(event, Beside | Repeated):
            found += sent_in(event.events)
    return found


@dataclass
class Log:
    """The events of one worker, in order."""

    events: list[Event] = field(default_factory=list)
    sent: int = 0
    task_queues: int = 0

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self.events = self.events, []
        return taken


class RecordingComm(Communicator, Worker):
    """Rank 0 among `size` workers that all send the same tensors."""

    def __init__(self, size: int, log: Log | None = None, groups: list[list[int]] | None = None) -> None:
        self.rank, self.size = 0, size
        self.log = Log() if log is None else log
        self.groups = groups  # None: everyone
        self._children: dict[tuple[int, ...], RecordingComm] = {}

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        number, given = self.log.sent, list(tensors)
        self.log.sent += 1
        self.log.events.append(
            Sent(number, kind.name, self.size, nbytes(given), control, self.groups is None)
        )

        def wait() -> list[Tensor]:
            self.log.events.append(Waited(number))
            if control:
                return given * self.size  # nobody writes into words, so that 100 000 need no copies
            with torch.no_grad():
                return kind.deliver(given, kind.results([given] * self.size, src, [self.rank])[0])

        # Never done before the wait: a worker that polls learns of the arrival later, as in a real run.
        return Pending(wait, lambda: False, lambda: 0.0)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(tuple(group) for group in groups if self.rank in group)
        if mine not in self._children:
            self._children[mine] = RecordingComm(len(mine), self.log)
        self._children[mine].groups = [list(group) for group in groups]
        return self._children[mine]

    @property
    def worker(self) -> Worker:
        return self

    def duplicate(self) -> Communicator:
        return RecordingComm(self.size, self.log, self.groups)

    def task_queue(self) -> TaskQueue:
        return RecordingQueue(self.log)

    def sidecar(self) -> Sidecar:
        return NullSidecar(RecordingComm(self.size, self.log, self.groups))

    def leave(self, departure: Departure) -> None:
        pass

    def now(self) -> float:
        return 0.0

    def computed(self, step: int) -> None:
        self.log.events.append(Computed(step))


class RecordingQueue(TaskQueue):
    """Runs jobs at once and records what they send and wait for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log, self._number = log, log.task_queues
        log.task_queues += 1

    def give(self, job: Callable[[], T]) -> Pending[T]:
        log, number = self._log, self._log.sent
        log.sent += 1
        before, log.events = log.events, []
        result = self._do(job)
        log.events, inside = before, tuple(log.events)
        log.events.append(Beside(number, self._number, inside))

        def wait() -> T:
            log.events.append(Waited(number))
            return result

        return Pending(wait, lambda: False, lambda: 0.0)


class NullSidecar(Sidecar):
    """Does nothing: `WaitfreeModel` plans the work of sidecars."""

    heard = -1

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def start(self, work: Callable[[], None]) -> None:
        raise NotImplementedError

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        raise NotImplementedError

    def announce(self, number: int) -> None:
        raise NotImplementedError

    def check(self) -> None:
        pass

    def stop(self) -> None:
        pass
