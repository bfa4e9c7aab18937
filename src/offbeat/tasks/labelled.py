"""Labelled pictures: batches for each rank, the loss and the accuracy."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.base.errors import BadArgument
from offbeat.tasks.task import Batch, Batches, evaluating, shard

EVALUATED = 1000  # held-out pictures, evenly spaced
AT_ONCE = 250  # pictures per forward pass


class Labelled:
    """Pictures as bytes (count, channels, height, width) and labels. The first `trained` are for training.

    A worker's part is contiguous, so the caller shuffles them first.
    """

    def __init__(
        self,
        pictures: Tensor,
        labels: Tensor,
        *,
        trained: int,
        augment: Callable[[Batch, torch.Generator], Batch] | None = None,
    ) -> None:
        self.pictures, self.labels, self.trained, self.augment = pictures, labels, trained, augment

    def batches(self, rank: int, workers: int, batch_size: int, seed: int) -> Batches:
        """Random pictures of this rank's part."""
        part = shard(self.trained, rank=rank, workers=workers)
        if workers > self.trained:
            reason = f"there are {self.trained} training pictures, and each worker needs at least one; "
            advice = "use fewer workers or more data."
            raise BadArgument("workers", workers, reason + advice, call="batches")
        return Batches(part, self.take, rank=rank, batch_size=batch_size, seed=seed, augment=self.augment)

    def take(self, positions: Tensor) -> Batch:
        """The pictures at these positions, scaled to 0–1, and their labels."""
        return self.pictures[positions].float() / 255, self.labels[positions]

    def evaluate(self, model: nn.Module) -> float:
        """The mean loss over at most 1000 held-out pictures."""
        losses = [F.cross_entropy(logits, labels, reduction="sum") for logits, labels in self._predict(model)]
        return torch.stack(losses).sum().item() / self._evaluated()

    def accuracy(self, model: nn.Module) -> float:
        """The share of the same pictures that the model classifies correctly."""
        right = [(logits.argmax(1) == labels).sum() for logits, labels in self._predict(model)]
        return torch.stack(right).sum().item() / self._evaluated()

    def _evaluated(self) -> int:
        return min(EVALUATED, len(self.labels) - self.trained)

    def _predict(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        held_out, count = len(self.labels) - self.trained, self._evaluated()
        positions = self.trained + torch.arange(count, device="cpu") * held_out // count
        with evaluating(model):
            return [predict(model, self.take(part)) for part in torch.split(positions, AT_ONCE)]


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits and the labels, both on the model's device."""
    device = next(model.parameters()).device
    pictures, labels = (tensor.to(device) for tensor in batch)
    return model(pictures), labels


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of −ln p(label)."""
    return F.cross_entropy(*predict(model, batch))
