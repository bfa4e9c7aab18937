"""What every task provides: a model, its loss, batches for each worker and an evaluation."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from offbeat.base.errors import BadArgument, suggest
from offbeat.tasks.loader import LoaderBatches

Batch = tuple[Tensor, Tensor]  # inputs and targets
FilePath = str | os.PathLike[str]
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Batches(Iterator[Batch]):
    """One worker's endless batches, drawn with replacement from its own positions in the data.

    A batch is a pure function of (seed, rank, step). The only state is the step, so resuming is exact.
    `gather` turns drawn positions into a batch. `augment` changes it at random, with the same generator.
    """

    positions: range
    gather: Callable[[Tensor], Batch]
    _: KW_ONLY
    rank: int
    batch_size: int
    seed: int
    augment: Callable[[Batch, torch.Generator], Batch] | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BadArgument("batch_size", self.batch_size, "batch_size must be at least 1.", call="batches")

    def __next__(self) -> Batch:
        digest = hashlib.blake2b(f"{self.seed}/{self.rank}/{self.step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        ends, shape = (self.positions.start, self.positions.stop), (self.batch_size,)
        self.step += 1
        batch = self.gather(torch.randint(*ends, shape, generator=generator, device="cpu"))
        return batch if self.augment is None else self.augment(batch, generator)

    def state_dict(self) -> dict[str, int]:
        """The step of the next batch."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch that was next when `state` was taken."""
        self.step = state["step"]


class Sharded(Protocol):
    """Gives a rank its batches. Each of `workers` ranks draws from a part that no other rank sees.

    It returns `Batches`, or a DataLoader of the rank's part.
    """

    def __call__(self, rank: int, workers: int, batch_size: int, seed: int) -> Any: ...


@dataclass(frozen=True)
class Endless:
    """The batches of a task. A DataLoader is started again after each pass."""

    batches: Sharded

    def __call__(self, rank: int, workers: int, batch_size: int, seed: int) -> Batches | LoaderBatches:
        given: Batches | DataLoader[Any] = self.batches(rank, workers, batch_size, seed)
        return LoaderBatches(given, rank=rank, seed=seed) if isinstance(given, DataLoader) else given


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """AdamW with settings that suit small models."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def heavy_ball(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to train.

    `model` builds the model, with equal weights on every rank. `loss` is its mean loss on a batch, which is
    moved to the model's device. `batches` are the endless training batches of one rank; if it returns a
    DataLoader, that is started again after each pass. `evaluate` is the loss on data that no rank trains on,
    and `accuracy` the share of them that a classifier gets right; both leave train/eval mode as it was.
    `unit` is what one target is, in the plural: images, bytes. `optimizer`, `lr` and `batch_size` are
    defaults that train it well.

        task = bytes_task("tiny")
        model, batches = task.model(), task.batches(rank=0, workers=4, batch_size=16, seed=0)
        task.loss(model, next(batches)).backward()
    """

    name: str = "task"
    model: Callable[[], nn.Module] = field(repr=False)
    loss: Callable[[nn.Module, Batch], Tensor] = field(repr=False)
    batches: Sharded = field(repr=False)
    evaluate: Callable[[nn.Module], float] = field(repr=False)
    accuracy: Callable[[nn.Module], float] | None = field(default=None, repr=False)
    unit: str = field(default="samples", repr=False)
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] = field(default=adamw, repr=False)
    lr: float = field(default=1e-3, repr=False)
    batch_size: int = field(default=16, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.batches, Endless):
            object.__setattr__(self, "batches", Endless(self.batches))


def shard(length: int, *, rank: int, workers: int) -> range:
    """The positions of one rank: `range(length)` cut into `workers` parts that differ by at most one."""
    if workers < 1:
        raise BadArgument("workers", workers, "workers must be at least 1.", call="batches")
    if not 0 <= rank < workers:
        raise ValueError(f"batches(rank={rank}, workers={workers}): rank must be from 0 to {workers - 1}.")
    return range(rank * length // workers, (rank + 1) * length // workers)


def find_size(task: str, size: str, sizes: Mapping[str, T]) -> T:
    if size not in sizes:
        known = f"size must be one of {', '.join(map(repr, sizes))}{suggest(size, sizes)}."
        raise BadArgument("size", size, known, call=task)
    return sizes[size]


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits, one row per target, and the targets, on the model's device."""
    device = next(model.parameters()).device
    return model(batch[0].to(device)).flatten(0, -2), batch[1].to(device).flatten()


def predict_all(model: nn.Module, batches: Iterable[Batch]) -> list[tuple[Tensor, Tensor]]:
    """Predict each batch in eval mode and without gradients. Restores the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return [predict(model, batch) for batch in batches]
    finally:
        for module, training in modes:
            module.training = training


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of −ln p(target)."""
    return F.cross_entropy(*predict(model, batch))
