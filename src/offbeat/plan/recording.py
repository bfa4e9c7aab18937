"""A communicator that answers itself and notes what would have been sent, and waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from offbeat.comm.communicator import WORDS, Communicator, words
from offbeat.comm.departure import Departure
from offbeat.comm.metered import nbytes
from offbeat.comm.pending import Pending
from offbeat.comm.sidecar import Sidecar
from offbeat.comm.task_queue import TaskQueue

T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    """A message was given to the network."""

    number: int
    kind: str
    size: int  # workers that take part
    given: int  # bytes
    control: bool  # a header word, which passes the queue by
    everyone: bool  # or a part of the workers


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
    """A job was given to a task queue, who sends and waits beside the worker, one job after the other."""

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
    """All messages, the task queue's included."""
    found: list[Sent] = []
    for event in events:
        if isinstance(event, Sent):
            found.append(event)
        elif isinstance(event, Beside | Repeated):
            found += sent_in(event.events)
    return found


@dataclass
class Log:
    """What a worker did, in order."""

    events: list[Event] = field(default_factory=list)
    sent: int = 0
    task_queues: int = 0

    def take(self) -> list[Event]:
        """All since the last time."""
        taken, self.events = self.events, []
        return taken


class RecordingComm(Communicator):
    """Rank 0 among `size` workers that all send the very same."""

    def __init__(self, size: int, log: Log | None = None, groups: list[list[int]] | None = None) -> None:
        self.rank, self.size = 0, size
        self.log = Log() if log is None else log
        self.groups = groups  # None: everyone
        self._children: dict[tuple[int, ...], RecordingComm] = {}

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        given = list(tensors)
        sent = nbytes(given)
        for tensor in given:
            tensor.mul_(self.size)
        return self._message("mean", sent, lambda: given)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        return self._message("gather", nbytes([tensor]), lambda: [tensor.clone() for _ in range(self.size)])

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        return self._message("exchange", nbytes(chunks), lambda: [chunks[0].clone() for _ in chunks])

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        return self._message("broadcast", nbytes(tensors), lambda: list(tensors))

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        return self._message("shift", nbytes([tensor]), tensor.clone)

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        word = words(numbers).tolist()
        return self._message("gather", 8 * WORDS, lambda: [word] * self.size, control=True)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(tuple(group) for group in groups if self.rank in group)
        if mine not in self._children:
            self._children[mine] = RecordingComm(len(mine), self.log)
        self._children[mine].groups = [list(group) for group in groups]
        return self._children[mine]

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

    def _message(
        self, kind: str, given: int, answer: Callable[[], T], *, control: bool = False
    ) -> Pending[T]:
        number = self.log.sent
        self.log.sent += 1
        self.log.events.append(Sent(number, kind, self.size, given, control, self.groups is None))

        def wait() -> T:
            self.log.events.append(Waited(number))
            return answer()

        # Never there before it is waited for: a worker that looks finds out later, which is what it would do.
        return Pending(wait, lambda: False, lambda: 0.0)


class RecordingQueue(TaskQueue):
    """Does jobs at once, and notes what they send and wait for."""

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
    """Does nothing: what sidecars do is planned by `WaitfreeModel`, not watched."""

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
