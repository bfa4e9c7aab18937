"""Pictures with labels: who sees which, and how well a model tells them apart."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.tasks.task import Batch, Batches, evaluating, shard

EVALUATED = 1000  # held-out pictures, evenly spaced
AT_ONCE = 250  # of them through the model at a time


class Labelled:
    """Pictures as bytes (count, channels, height, width) and labels; the first `trained` are trained on.

    The caller has shuffled them: a worker's part is contiguous.
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
            raise ValueError(
                f"batches(workers={workers}): there are {self.trained} pictures to train on, and every "
                "worker needs one of its own; use fewer workers or more data."
            )
        return Batches(part, self.take, rank=rank, batch_size=batch_size, seed=seed, augment=self.augment)

    def take(self, places: Tensor) -> Batch:
        """The pictures at these places, with values from 0 to 1, and their labels."""
        return self.pictures[places].float() / 255, self.labels[places]

    def evaluate(self, model: nn.Module) -> float:
        """The mean loss over the held-out pictures, a thousand at most."""
        losses = [F.cross_entropy(logits, labels, reduction="sum") for logits, labels in self._answers(model)]
        return torch.stack(losses).sum().item() / self._evaluated()

    def accuracy(self, model: nn.Module) -> float:
        """The share of them that the model names rightly."""
        right = [(logits.argmax(1) == labels).sum() for logits, labels in self._answers(model)]
        return torch.stack(right).sum().item() / self._evaluated()

    def _evaluated(self) -> int:
        return min(EVALUATED, len(self.labels) - self.trained)

    def _answers(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        held_out, count = len(self.labels) - self.trained, self._evaluated()
        places = self.trained + torch.arange(count, device="cpu") * held_out // count
        with evaluating(model):
            return [answer(model, self.take(part)) for part in torch.split(places, AT_ONCE)]


def answer(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the model says and what is right, both on the model's device."""
    device = next(model.parameters()).device
    pictures, labels = (tensor.to(device) for tensor in batch)
    return model(pictures), labels


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of −ln p(label)."""
    return F.cross_entropy(*answer(model, batch))


def size_of(call: str, size: str, sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    if size not in sizes:
        known = ", ".join(repr(name) for name in sizes)
        raise ValueError(f"{call}(size={size!r}): size must be one of {known}.")
    return sizes[size]
