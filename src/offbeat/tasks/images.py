"""Your own pictures, in a folder or zip of train/CLASS/*.jpg, and a small residual network."""

import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offbeat.tasks.album import open_album
from offbeat.tasks.labelled import Labelled, cross_entropy
from offbeat.tasks.resnet import build_resnet
from offbeat.tasks.task import Batch, Task, heavy_ball, look_up_size

# Blocks per width, then the widths.
SIZES = {"tiny": (1, 8, 16), "small": (1, 16, 32, 64), "medium": (3, 16, 32, 64), "large": (2, 64, 128, 256)}
SHIFT = 4  # pixels at most, of 32


def images_task(
    size: str = "small",
    *,
    data: str | os.PathLike[str],
    pixels: int = 32,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
) -> Task:
    """Classify the pictures of a folder or zip of train/CLASS/*.jpg (or .png).

    ====== ========== ======= ================ ======
    size   parameters tensors widths           blocks
    ====== ========== ======= ================ ======
    tiny        5 266      20 8, 16                 1
    small      78 042      29 16, 32, 64            1
    medium    272 474      65 16, 32, 64            3
    large   2 777 674      47 64, 128, 256          2
    ====== ========== ======= ================ ======

    The table counts the parameters for ten classes. Pictures in test/CLASS or val/CLASS are held out; without
    such folders, a tenth of the training pictures is. Training pictures are mirrored and shifted at random;
    the draw depends on (seed, rank, step), as for the batches. Batch normalization gives this task floating
    buffers. Needs Pillow, which offbeat[cli] installs.

    Args:
        pixels: every picture is resized to this height and width; larger is slower.
        seed: seeds the initial weights; batches take their own seed.
        cache: a folder where decoded pictures are kept for the next process.

    Example:
        >>> task = images_task("tiny", data="cifar10.zip")
        >>> task.accuracy(task.model())
    """
    blocks, *widths = look_up_size("images_task", size, SIZES)
    if pixels < 8:
        raise ValueError(f"images_task(pixels={pixels}): pixels must be at least 8.")
    album = open_album(data, pixels=pixels, cache=cache)
    pictures = Labelled(album.pictures, album.labels, trained=album.trained, augment=augment)
    return Task(
        name=f"images-{size}",
        model=partial(build_resnet, tuple(widths), blocks, classes=len(album.classes), seed=seed),
        loss=cross_entropy,
        batches=pictures.batches,
        evaluate=pictures.evaluate,
        accuracy=pictures.accuracy,
        unit="images",
        optimizer=heavy_ball,
        lr=0.05,
        batch_size=32,
    )


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Mirror half of the pictures, and shift each by up to an eighth of its width. Gaps are black."""
    pictures, labels = batch
    count, side = len(pictures), pictures.shape[-1]
    margin = max(1, SHIFT * side // 32)
    mirrored = torch.rand(count, generator=generator, device="cpu") < 0.5
    pictures = torch.where(mirrored[:, None, None, None], pictures.flip(-1), pictures)
    down, right = torch.randint(0, 2 * margin + 1, (2, count), generator=generator, device="cpu")
    return _crop(F.pad(pictures, (margin,) * 4), down, right, side), labels


def _crop(padded: Tensor, down: Tensor, right: Tensor, side: int) -> Tensor:
    """Crop a square from each picture at its own offset."""
    along = torch.arange(side, device="cpu")
    rows, columns = (down[:, None] + along)[:, :, None], (right[:, None] + along)[:, None, :]
    numbers = torch.arange(len(padded), device="cpu")[:, None, None]
    return padded[numbers, :, rows, columns].permute(0, 3, 1, 2)
