"""Pictures of one's own, in a folder or a zip of train/CLASS/*.jpg, and a small residual network."""

import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offbeat.tasks.album import open_album
from offbeat.tasks.labelled import Labelled, cross_entropy, size_of
from offbeat.tasks.resnet import build_resnet
from offbeat.tasks.task import Batch, Task, heavy_ball

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
    """Tell classes of pictures apart, given as train/CLASS/*.jpg (or png) in a folder or a zip of one.

    ====== ========== ======= ================ ======
    size   parameters tensors widths           blocks
    ====== ========== ======= ================ ======
    tiny        5 266      20 8, 16                 1
    small      78 042      29 16, 32, 64            1
    medium    272 474      65 16, 32, 64            3
    large   2 777 674      47 64, 128, 256          2
    ====== ========== ======= ================ ======

    The parameters are for ten classes. What stands in test/CLASS or val/CLASS is held out; without such a
    folder every tenth picture is. Training pictures are mirrored and shifted at random, by (seed, rank, step)
    like the batches themselves. Batch normalization makes this the task with floating buffers. Needs Pillow,
    a part of offbeat[cli].

    Args:
        pixels: height and width that every picture is brought to; larger is slower.
        seed: of the initial weights. Batches take their own.
        cache: a folder to keep the decoded pictures in, for the next process that asks for the same.

    Example:
        >>> task = images_task("tiny", data="cifar10.zip")
        >>> task.accuracy(task.model())
    """
    blocks, *widths = size_of("images_task", size, SIZES)
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
    """Each picture mirrored or not, and shifted by up to an eighth of its width; what moves in is black."""
    pictures, labels = batch
    count, side = len(pictures), pictures.shape[-1]
    margin = max(1, SHIFT * side // 32)
    mirrored = torch.rand(count, generator=generator, device="cpu") < 0.5
    pictures = torch.where(mirrored[:, None, None, None], pictures.flip(-1), pictures)
    down, right = torch.randint(0, 2 * margin + 1, (2, count), generator=generator, device="cpu")
    return _cut(F.pad(pictures, (margin,) * 4), down, right, side), labels


def _cut(padded: Tensor, down: Tensor, right: Tensor, side: int) -> Tensor:
    """From each picture the square of this side at its own place."""
    along = torch.arange(side, device="cpu")
    rows, columns = (down[:, None] + along)[:, :, None], (right[:, None] + along)[:, None, :]
    numbers = torch.arange(len(padded), device="cpu")[:, None, None]
    return padded[numbers, :, rows, columns].permute(0, 3, 1, 2)
