"""What every task offers: a model, its loss, batches for each worker, and a held-out evaluation."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


class Batches(Iterator[Batch]):
    """One worker's endless batches, drawn with replacement from its own positions in the data.

    A batch is a pure function of (seed, rank, step), so the only state is the step, and resuming costs
    nothing and is exact.

    Args:
        positions: the positions this worker may draw.
        gather: turns drawn positions into a batch.
    """

    def __init__(
        self, positions: range, gather: Callable[[Tensor], Batch], *, rank: int, batch_size: int, seed: int
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batches(batch_size={batch_size}): batch_size must be at least 1.")
        self.positions, self.gather = positions, gather
        self.rank, self.batch_size, self.seed = rank, batch_size, seed
        self.step = 0

    def __next__(self) -> Batch:
        digest = hashlib.blake2b(f"{self.seed}/{self.rank}/{self.step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        low, high = self.positions.start, self.positions.stop
        drawn = torch.randint(low, high, (self.batch_size,), generator=generator, device="cpu")
        self.step += 1
        return self.gather(drawn)

    def state_dict(self) -> dict[str, int]:
        """The step of the next batch."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch that was next when `state` was taken."""
        self.step = state["step"]


class Sharded(Protocol):
    """How a task hands out its data: `rank` of `workers` draws from a part that no other rank sees."""

    def __call__(self, rank: int, workers: int, batch_size: int, seed: int) -> Batches: ...


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        name: as printed in tables.
        model: builds the model, with equal weights on every rank.
        loss: the mean loss of a model on a batch; the batch follows the model to its device.
        batches: the endless training batches of one rank.
        evaluate: the loss on data that no rank trains on; leaves train/eval mode as it was.

    Example:
        >>> task = bytes_task("tiny")
        >>> model, batches = task.model(), task.batches(rank=0, workers=4, batch_size=16, seed=0)
        >>> task.loss(model, next(batches)).backward()
    """

    name: str
    model: Callable[[], nn.Module] = field(repr=False)
    loss: Callable[[nn.Module, Batch], Tensor] = field(repr=False)
    batches: Sharded = field(repr=False)
    evaluate: Callable[[nn.Module], float] = field(repr=False)


def shard(length: int, *, rank: int, workers: int) -> range:
    """The positions of one rank: `range(length)` cut into `workers` parts that differ by at most one."""
    if workers < 1:
        raise ValueError(f"batches(workers={workers}): workers must be at least 1.")
    if not 0 <= rank < workers:
        raise ValueError(f"batches(rank={rank}, workers={workers}): rank must be from 0 to {workers - 1}.")
    return range(rank * length // workers, (rank + 1) * length // workers)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards each module is back in the mode it had by itself."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
