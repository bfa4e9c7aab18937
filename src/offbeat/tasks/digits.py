"""The handwritten digits of scikit-learn and a small convolutional network."""

from functools import partial

import torch
from torch import Tensor, nn

from offbeat.tasks.labelled import Labelled, cross_entropy
from offbeat.tasks.task import Task, heavy_ball, look_up_size, seeded

SIZES = {"tiny": (8, 16, 32), "small": (16, 32, 64), "medium": (32, 64, 256), "large": (64, 128, 512)}
HELD_OUT = 5  # one picture in five


def digits_task(size: str = "small", *, seed: int = 0) -> Task:
    """Classify 1 797 pictures of digits, 8 × 8 pixels each. Guessing gives a loss of ln 10 ≈ 2.30.

    ====== ========== ======= ============
    size   parameters tensors channels
    ====== ========== ======= ============
    tiny        9 802       8 8, 16
    small      38 282       8 16, 32
    medium    283 786       8 32, 64
    large   1 128 714       8 64, 128
    ====== ========== ======= ============

    A fifth is held out, the same for every seed. Needs scikit-learn, which offbeat[cli] installs.

    Args:
        seed: seeds the initial weights; batches take their own seed.

    Example:
        >>> task = digits_task("tiny", seed=1)
        >>> task.accuracy(task.model())
    """
    widths = look_up_size("digits_task", size, SIZES)
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
    """All pictures as bytes and their labels, in a fixed shuffled order."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("digits_task needs scikit-learn: pip install 'offbeat[cli]'.") from None
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0), device="cpu")
    shades = torch.tensor(digits.images, dtype=torch.float32, device="cpu") * (255 / 16)
    labels = torch.tensor(digits.target, dtype=torch.int64, device="cpu")
    return shades.round().to(torch.uint8)[order, None], labels[order]


def build(widths: tuple[int, ...], *, seed: int) -> nn.Module:
    """Two convolutions, pooling and two linear layers. The seed fixes the weights."""
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
