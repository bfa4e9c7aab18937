"""Communicators around another one: the plain passing on, and the count of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from offbeat.comm.collective import COLLECTIVES
from offbeat.comm.communicator import WORDS, Communicator
from offbeat.comm.departure import Departure
from offbeat.comm.pending import Pending
from offbeat.comm.place import Track
from offbeat.comm.sidecar import Sidecar

if TYPE_CHECKING:
    from offbeat.comm.task_queue import TaskQueue


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def traffic(kind: str, size: int, given: int) -> int:
    """Bytes one rank hands to the network for `given` bytes in a collective among `size` ranks."""
    return round(given * COLLECTIVES[kind].share(size))


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

    def duplicate(self) -> Communicator:
        return self.comm.duplicate()

    def task_queue(self) -> TaskQueue:
        return self.comm.task_queue()

    def sidecar(self) -> Sidecar:
        return self.comm.sidecar()

    def leave(self, departure: Departure) -> None:
        self.comm.leave(departure)

    def follow(self, track: Track) -> None:
        self.comm.follow(track)

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
