"""Handwritten digits, which come with scikit-learn, and a small convolutional network."""

from functools import partial

import torch
from torch import Tensor, nn

from offbeat.tasks.labelled import Labelled, cross_entropy, size_of
from offbeat.tasks.task import Task, heavy_ball, seeded

SIZES = {"tiny": (8, 16, 32), "small": (16, 32, 64), "medium": (32, 64, 256), "large": (64, 128, 512)}
HELD_OUT = 5  # one part in so many


def digits_task(size: str = "small", *, seed: int = 0) -> Task:
    """Tell the ten digits apart in 1 797 pictures of 8 × 8 pixels; ln 10 ≈ 2.30 knows nothing.

    ====== ========== ======= ============
    size   parameters tensors channels
    ====== ========== ======= ============
    tiny        9 802       8 8, 16
    small      38 282       8 16, 32
    medium    283 786       8 32, 64
    large   1 128 714       8 64, 128
    ====== ========== ======= ============

    A fifth is held out, the same for every seed. Needs scikit-learn, a part of offbeat[cli].

    Args:
        seed: of the initial weights. Batches take their own.

    Example:
        >>> task = digits_task("tiny", seed=1)
        >>> task.accuracy(task.model())
    """
    widths = size_of("digits_task", size, SIZES)
    digits = Labelled(*load(), trained=1797 - 1797 // HELD_OUT)
    return Task(
        name=f"digits-{size}",
        model=partial(build, widths, seed=seed),
        loss=cross_entropy,
        batches=digits.batches,
        evaluate=digits.evaluate,
        accuracy=digits.accuracy,
        unit="images",
        optimizer=heavy_ball,
        lr=0.05,
    )


def load() -> tuple[Tensor, Tensor]:
    """All pictures as bytes, and their labels, in one order that never changes."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(
            "digits_task: the digits come with scikit-learn: pip install 'offbeat[cli]'."
        ) from None
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0), device="cpu")
    shades = torch.tensor(digits.images, dtype=torch.float32, device="cpu") * (255 / 16)
    labels = torch.tensor(digits.target, dtype=torch.int64, device="cpu")
    return shades.round().to(torch.uint8)[order, None], labels[order]


def build(widths: tuple[int, ...], *, seed: int) -> nn.Module:
    """Two convolutions, a pooling, two layers: weights depend on widths and seed alone."""
    first, second, hidden = widths
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * 16, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )
