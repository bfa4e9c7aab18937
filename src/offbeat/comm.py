"""How workers talk: messages in the air, the communicator's contract, a world of one, a byte counter."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from offbeat.companion import Companion
from offbeat.errors import Disagreement, NotFinite, OffbeatError, PeerLost

if TYPE_CHECKING:
    from offbeat.courier import Courier

T = TypeVar("T")
S = TypeVar("S")


class Pending(Generic[T]):
    """A message in the air."""

    def __init__(
        self,
        wait: Callable[[], T],
        done: Callable[[], bool],
        arrived: Callable[[], float],
        advance: Callable[[], None] | None = None,
    ) -> None:
        self._wait: Callable[[], T] | None = wait
        self._done = done
        self._arrived = arrived
        self._advance = advance

    def wait(self) -> T:
        """The message, once it has arrived. Idempotent; raises `PeerLost` if it never will."""
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._wait is None or self._done()

    def advance(self) -> None:
        """Of a question and an answer: wait for the question to arrive, and send the answer. All ranks call
        this at the same point, or none; messages of one part have nothing to do."""
        if self._wait is not None and self._advance is not None:
            self._advance()

    @property
    def answers(self) -> bool:
        """Whether it is a question and an answer, so that `advance` has something to do."""
        return self._advance is not None

    def arrived(self) -> float:
        """When it arrived, on the communicator's clock; to be asked after `wait`."""
        return self._arrived()

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """The message with `change` applied to it on arrival."""
        advance = self.advance if self.answers else None
        return Pending(lambda: change(self.wait()), self.done, self.arrived, advance)


def arrived(value: T) -> Pending[T]:
    """A message that is already here."""
    return Pending(lambda: value, lambda: True, lambda: 0.0)


class Communicator(ABC):
    """The workers that share one model, seen from one of them.

    Every rank makes the same calls in the same order. A message owns its tensors until it has arrived: do not
    touch them in between; results may lie in the memory that was given. Shapes and dtypes agree on all ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        """The sum over all ranks, in place. Each tensor is sent before the next is asked for."""

    def mean(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        """The mean over all ranks, as sum × (1/size), in place."""
        return self.total(tensors).then(lambda sums: [total.mul_(1 / self.size) for total in sums])

    @abstractmethod
    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        """Every rank's tensor, in rank order."""

    @abstractmethod
    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Chunk j goes to rank j; the answer holds what every rank sent here. All chunks have one shape."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        """The tensors of rank `src`, in place."""

    @abstractmethod
    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        """At most eight whole numbers from every rank, in rank order, on a lane of their own."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of the group this rank is in; the groups are disjoint and cover all ranks."""

    def twin(self) -> Communicator:
        """Another communicator of the same ranks, whose messages have an order of their own."""
        raise NotImplementedError(f"{type(self).__name__} has no twin().")

    def courier(self) -> Courier:
        """Somebody who works beside this worker, on its clock."""
        from offbeat.courier import Threaded  # which is made of what stands here

        return Threaded()

    @abstractmethod
    def leave(self, farewell: Farewell) -> None:
        """Tell the others that this rank has failed and sends no more, so that nobody waits for it."""

    def companion(self) -> Companion:
        """A thread beside this worker's own, with its own connections; all ranks ask for theirs together."""
        raise NotImplementedError(
            f"{type(self).__name__}.companion(): only Torch and simulated workers can have a second thread."
        )

    def scatter_mean(self, tensor: Tensor) -> Pending[Tensor]:
        """The mean of this rank's slice of a vector whose length is a multiple of size, summed in rank order.

        An all-to-all and a local sum: gloo's own reduce-scatter moves as many bytes as an all-reduce.
        """
        if tensor.numel() % self.size:
            raise ValueError(
                f"scatter_mean: {tensor.numel()} values cannot be cut into {self.size} equal slices: pad."
            )
        return self.exchange(list(tensor.flatten().chunk(self.size))).then(
            lambda slices: sum_in_order(slices).mul_(1 / self.size)
        )

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        """The tensor of the rank before, the last one's at the first; this rank's goes to the one after."""
        return self.gather(tensor).then(lambda parts: parts[self.rank - 1])

    def now(self) -> float:
        """Seconds on this worker's clock."""
        return time.perf_counter()

    def computed(self, step: int) -> None:
        """The gradient after `step` iterations is ready: a simulated clock moves, others look at it."""
        return None


WORDS = 8  # numbers in a `tell`; a fixed size, since gloo ends the process when sizes differ


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, taken from the first to the last."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def words(numbers: Sequence[int]) -> Tensor:
    assert len(numbers) <= WORDS
    return torch.tensor([*numbers, *[0] * (WORDS - len(numbers))], dtype=torch.int64)


@dataclass(frozen=True)
class Farewell:
    """Why a rank left: its own trouble, or an error that concerns everybody, to be raised by all."""

    text: str
    shared: str | None = None  # the kind of the error

    @classmethod
    def of(cls, error: BaseException) -> Farewell:
        for kind in _SHARED:
            if isinstance(error, kind):
                return cls(str(error), shared=kind.__name__)
        return cls(f"failed ({type(error).__name__}: {error})")

    def error(self, rank: int, what: str) -> OffbeatError:
        """What somebody who waits for `what` from this rank raises."""
        for kind in _SHARED:
            if self.shared == kind.__name__:
                return kind(self.text)
        return PeerLost(f"Waiting for {what}: rank {rank} {self.text}.")


_SHARED: tuple[type[OffbeatError], ...] = (Disagreement, NotFinite, PeerLost)


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def traffic(kind: str, size: int, given: int) -> int:
    """Bytes one rank hands to the network for `given` bytes in a collective among `size` ranks.

    A ring or halving all-reduce sends each byte twice but for the own share, an all-gather sends the own
    part to all others, an all-to-all all but the own chunk. The bytes of a broadcast are the average.
    """
    others = size - 1
    share = {
        "mean": 2 * others / size,
        "gather": others,
        "exchange": others / size,
        "broadcast": others / size,
        "shift": 1 if others else 0,
    }
    return round(given * share[kind])


class Solo(Communicator):
    """A world of one: every message has already arrived."""

    rank, size = 0, 1

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        return arrived(list(tensors))

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        return arrived([tensor])

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        return arrived(list(chunks))

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        return arrived(list(tensors))

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        return arrived([words(numbers).tolist()])

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self

    def twin(self) -> Communicator:
        return self

    def courier(self) -> Courier:
        from offbeat.courier import Prompt

        return Prompt()

    def leave(self, farewell: Farewell) -> None:
        pass


class Wrapped(Communicator):
    """Another communicator, to which everything is passed on: kinds of it change what they are for."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        return self.comm.total(tensors)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        return self.comm.gather(tensor)

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        return self.comm.exchange(chunks)

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        return self.comm.broadcast(tensors, src)

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        return self.comm.tell(numbers)

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        return self.comm.shift(tensor)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self.comm.split(groups)

    def twin(self) -> Communicator:
        return self.comm.twin()

    def courier(self) -> Courier:
        return self.comm.courier()

    def companion(self) -> Companion:
        return self.comm.companion()

    def leave(self, farewell: Farewell) -> None:
        self.comm.leave(farewell)

    def now(self) -> float:
        return self.comm.now()

    def computed(self, step: int) -> None:
        self.comm.computed(step)


class Metered(Wrapped):
    """Another communicator, with its bytes counted in `sent` and `received`."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.sent = self.received = 0

    def _count(self, kind: str, given: int) -> None:
        amount = traffic(kind, self.size, given)
        self.sent += amount
        self.received += amount

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        return self.comm.total(self._counted(tensors))

    def _counted(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            self._count("mean", nbytes([tensor]))
            yield tensor

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        self._count("gather", nbytes([tensor]))
        return self.comm.gather(tensor)

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        self._count("exchange", nbytes(chunks))
        return self.comm.exchange(chunks)

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        self._count("broadcast", nbytes(tensors))
        return self.comm.broadcast(tensors, src)

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        self._count("gather", 8 * WORDS)
        return self.comm.tell(numbers)

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        self._count("shift", nbytes([tensor]))
        return self.comm.shift(tensor)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return Metered(self.comm.split(groups))
