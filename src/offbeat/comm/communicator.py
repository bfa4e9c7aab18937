"""How workers talk: the communicator's contract, and a world of one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from offbeat.comm.departure import Departure
from offbeat.comm.pending import Pending, arrived
from offbeat.comm.sidecar import Sidecar

if TYPE_CHECKING:
    from offbeat.comm.place import Track
    from offbeat.comm.task_queue import TaskQueue

T = TypeVar("T")
S = TypeVar("S")


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
        """At most eight whole numbers from every rank, in rank order, on a connection of their own."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of the group this rank is in; the groups are disjoint and cover all ranks."""

    def duplicate(self) -> Communicator:
        """Another communicator of the same ranks, whose messages have an order of their own."""
        raise NotImplementedError(f"{type(self).__name__} has no duplicate().")

    def task_queue(self) -> TaskQueue:
        """Somebody who works beside this worker, on its clock."""
        from offbeat.comm.task_queue import ThreadQueue  # which is made of what stands here

        return ThreadQueue()

    @abstractmethod
    def leave(self, departure: Departure) -> None:
        """Tell the others that this rank has failed and sends no more, so that nobody waits for it."""

    def sidecar(self) -> Sidecar:
        """A thread beside this worker's own, with its own connections; all ranks ask for theirs together."""
        raise NotImplementedError(
            f"{type(self).__name__}.sidecar(): only Torch and simulated workers can have a second thread."
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

    def follow(self, track: Track) -> None:
        """A run begins whose place others may ask for while they wait; on all ranks in the same order."""
        return None

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

    def duplicate(self) -> Communicator:
        return self

    def task_queue(self) -> TaskQueue:
        from offbeat.comm.task_queue import InlineQueue

        return InlineQueue()

    def leave(self, departure: Departure) -> None:
        pass
