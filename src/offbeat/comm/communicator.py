"""How workers communicate: messages, the contract of communicators, and wrappers around them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from offbeat.comm.collective import BROADCAST, EXCHANGE, GATHER, SHIFT, SUM, Collective, nbytes

if TYPE_CHECKING:
    from offbeat.comm.background import Sidecar, TaskQueue
    from offbeat.comm.presence import Departure, Track

T = TypeVar("T")
S = TypeVar("S")
Tensors = Sequence[Tensor]

WORDS = 8  # numbers in a `tell`; a fixed size, since gloo ends the process when sizes differ


class Pending(Generic[T]):
    """A message in flight."""

    def __init__(self, wait: Callable[[], T], done: Callable[[], bool], arrived: Callable[[], float]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._done, self._arrived = done, arrived

    def wait(self) -> T:
        """Wait for the message and return it. Idempotent; raises `PeerLost` if it will never arrive."""
        if (wait := self._wait) is not None:  # read once: another thread may wait, too
            self._value = wait()
            self._wait = None
        return self._value

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._wait is None or self._done()

    def arrived(self) -> float:
        """The time of arrival on the communicator's clock; valid after `wait`."""
        return self._arrived()

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """Return the message with `change` applied to it on arrival."""
        return Pending(lambda: change(self.wait()), self.done, self.arrived)


PendingList = Pending[list[Tensor]]


def arrived(value: T) -> Pending[T]:
    """Return a message that has already arrived."""
    return Pending(lambda: value, lambda: True, lambda: 0.0)


def join_messages(messages: Sequence[Pending[Any]]) -> Pending[None]:
    """Return several messages as one, which has arrived once all of them have."""

    def wait() -> None:
        for message in messages:
            message.wait()

    return Pending(wait, lambda: all(m.done() for m in messages), lambda: max(m.arrived() for m in messages))


class Communicator(ABC):
    """The workers that share one model, seen from one of them.

    Every rank makes the same calls in the same order, with the same shapes and dtypes. A message owns its
    tensors until it has arrived: do not touch them in between. Results may share memory with them.
    """

    rank: int
    size: int

    @abstractmethod
    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        """Start a collective. All calls below use this one. `src` is the source of a broadcast.

        A `control` message is a few bytes long and has a connection of its own.
        """

    def total(self, tensors: Tensors) -> PendingList:
        """The sum over all ranks, in place."""
        return self.run(SUM, tensors)

    def mean(self, tensors: Tensors) -> PendingList:
        """The mean over all ranks, as sum × (1/size), in place."""
        return self.run(SUM, tensors).then(lambda sums: [total.mul_(1 / self.size) for total in sums])

    def gather(self, tensor: Tensor) -> PendingList:
        """Every rank's tensor, in rank order."""
        return self.run(GATHER, [tensor])

    def exchange(self, chunks: Tensors) -> PendingList:
        """Send chunk j to rank j and get one chunk from every rank. All chunks have the same shape."""
        return self.run(EXCHANGE, chunks)

    def broadcast(self, tensors: Tensors, src: int = 0) -> PendingList:
        """The tensors of rank `src`, in place."""
        return self.run(BROADCAST, tensors, src=src)

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        """Send the tensor to the next rank and get the previous rank's. The ranks form a ring."""
        return self.run(SHIFT, [tensor]).then(lambda got: got[0])

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        """Up to eight whole numbers from every rank, in rank order, as a control message."""
        assert len(numbers) <= WORDS
        words = torch.tensor([*numbers, *[0] * (WORDS - len(numbers))], dtype=torch.int64)
        return self.run(GATHER, [words], control=True).then(lambda parts: torch.stack(parts).tolist())

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of this rank's group. The groups are disjoint and cover all ranks."""

    @property
    def worker(self) -> Worker:
        """This rank's own side: progress, departure, and background work."""
        assert isinstance(self, Worker)
        return self

    def now(self) -> float:
        """Seconds on this worker's clock."""
        return time.perf_counter()


class Worker(ABC):
    """One rank's own side of a communicator: what it tells others about itself, and its other threads."""

    def computed(self, step: int, share: float = 1.0) -> None:  # noqa: B027  # not every communicator cares
        """This share of the gradient after `step` iterations has been computed. A simulation moves its clock;
        others note which messages have arrived."""

    def skip(self) -> None:  # noqa: B027
        """The rest of the current gradient is not computed, so a simulation does not count its time."""

    def follow(self, track: Track) -> None:  # noqa: B027
        """A run begins. Other ranks may read its place while they wait. All ranks call this in one order."""

    @abstractmethod
    def leave(self, departure: Departure) -> None:
        """Tell the others that this rank has failed and sends nothing more, so that they do not wait."""

    def disconnect(self) -> None:  # noqa: B027
        """Close all connections after a failure, once the others have been told."""

    @abstractmethod
    def duplicate(self) -> Communicator:
        """Another communicator of the same ranks, whose messages have their own order."""

    @abstractmethod
    def task_queue(self) -> TaskQueue:
        """A queue of background jobs on this worker's clock."""

    @abstractmethod
    def sidecar(self) -> Sidecar:
        """A second thread with its own connections. All ranks call this together."""


class Wrapped(Communicator, Worker):
    """A communicator around another one. It passes all calls on; subclasses override what they need."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._children: dict[int, Communicator] = {}

    @abstractmethod
    def wrap(self, comm: Communicator) -> Communicator:
        """Return the same wrapper around a communicator made from the inner one."""

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        return self.comm.run(kind, tensors, src=src, control=control)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        part = self.comm.split(groups)
        if id(part) not in self._children:
            self._children[id(part)] = self.wrap(part)
        return self._children[id(part)]

    def now(self) -> float:
        return self.comm.now()

    def computed(self, step: int, share: float = 1.0) -> None:
        self.comm.worker.computed(step, share)

    def skip(self) -> None:
        self.comm.worker.skip()

    def follow(self, track: Track) -> None:
        self.comm.worker.follow(track)

    def leave(self, departure: Departure) -> None:
        self.comm.worker.leave(departure)

    def disconnect(self) -> None:
        self.comm.worker.disconnect()

    def duplicate(self) -> Communicator:
        return self.wrap(self.comm.worker.duplicate())

    def task_queue(self) -> TaskQueue:
        return self.comm.worker.task_queue()

    def sidecar(self) -> Sidecar:
        sidecar = self.comm.worker.sidecar()
        sidecar.comm = self.wrap(sidecar.comm)
        return sidecar


class Metered(Wrapped):
    """Another communicator, with its bytes counted in `sent` and `received`."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.sent = self.received = 0

    def wrap(self, comm: Communicator) -> Communicator:
        return Metered(comm)

    def move(self, to: Metered) -> None:
        """Move the bytes counted so far to another one."""
        to.sent, to.received = to.sent + self.sent, to.received + self.received
        self.sent = self.received = 0

    @property
    def worker(self) -> Worker:
        return self.comm.worker  # background messages are not counted here

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        amount = kind.sent(self.size, nbytes(tensors))
        self.sent += amount
        self.received += amount
        return self.comm.run(kind, tensors, src=src, control=control)
