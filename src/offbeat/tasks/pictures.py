"""Tasks with labelled pictures: handwritten digits, and a folder or zip of your own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.base.errors import BadArgument, how_to_install
from offbeat.tasks.album import FilePath, open_album
from offbeat.tasks.task import Batch, Batches, Task, cross_entropy, find_size, heavy_ball, predict_all, shard

DIGITS = {"tiny": (8, 16, 32), "small": (16, 32, 64), "medium": (32, 64, 256), "large": (64, 128, 512)}
# Blocks per width, then the widths.
IMAGES = {"tiny": (1, 8, 16), "small": (1, 16, 32, 64), "medium": (3, 16, 32, 64), "large": (2, 64, 128, 256)}
HELD_OUT = 5  # one digit in five
EVALUATED = 1000  # held-out pictures, evenly spaced
AT_ONCE = 250  # pictures per forward pass


def digits_task(size: str = "small", *, seed: int = 0) -> Task:
    """Classify 1 797 pictures of digits, 8 × 8 pixels each. Guessing gives a loss of ln 10 ≈ 2.30.

    The convolutional networks have 8 tensors: "tiny" 9 802 parameters, "small" 38 282, "medium" 283 786,
    "large" 1 128 714. A fifth of the pictures is held out, the same for every seed. `seed` fixes the initial
    weights; batches take their own. Needs scikit-learn, which the extra `cli` installs.

        task = digits_task("tiny", seed=1)
        task.accuracy(task.model())
    """
    widths = find_size("digits_task", size, DIGITS)
    pictures, labels = load_digits()
    digits = Labelled(pictures, labels, len(labels) - len(labels) // HELD_OUT)
    return digits.task(f"digits-{size}", partial(build_convolutions, widths, seed=seed))


def images_task(
    size: str = "small", *, data: FilePath, pixels: int = 32, seed: int = 0, cache: FilePath | None = None
) -> Task:
    """Classify the pictures of a folder or zip of train/CLASS/*.jpg (or .png).

    The residual networks have, for ten classes: "tiny" 5 266 parameters, "small" 78 042, "medium" 272 474,
    "large" 2 777 674. Batch normalization gives them floating buffers. Pictures in test/CLASS or val/CLASS
    are held out; without such folders, a tenth of the training pictures is. Training pictures are mirrored
    and shifted at random; the draw depends on (seed, rank, step), as for the batches. Needs Pillow, which
    the extra `cli` installs.

    Every picture is resized to `pixels` × `pixels`; larger is slower. `seed` fixes the initial weights;
    batches take their own. `cache` is a folder that keeps decoded pictures for the next process.

        task = images_task("tiny", data="cifar10.zip")
        task.accuracy(task.model())
    """
    blocks, *widths = find_size("images_task", size, IMAGES)
    if pixels < 8:
        raise ValueError(f"images_task(pixels={pixels}): pixels must be at least 8.")
    album = open_album(data, pixels=pixels, cache=cache)
    pictures = Labelled(album.pictures, album.labels, album.trained, augmented=True)
    build = partial(build_resnet, tuple(widths), blocks, classes=len(album.classes), seed=seed)
    return pictures.task(f"images-{size}", build, batch_size=32)


class Labelled:
    """Shuffled pictures as bytes (count, channels, height, width) and labels; `trained` are for training."""

    def __init__(self, pictures: Tensor, labels: Tensor, trained: int, *, augmented: bool = False) -> None:
        self.pictures, self.labels, self.trained, self.augmented = pictures, labels, trained, augmented
        held_out = len(labels) - trained
        self.count = min(EVALUATED, held_out)
        self.evaluated = trained + torch.arange(self.count, device="cpu") * held_out // self.count

    def task(self, name: str, model: Callable[[], nn.Module], *, batch_size: int = 16) -> Task:
        return Task(
            name=name,
            model=model,
            loss=cross_entropy,
            batches=self.batches,
            evaluate=self.evaluate,
            accuracy=self.accuracy,
            unit="images",
            optimizer=heavy_ball,
            lr=0.05,
            batch_size=batch_size,
        )

    def batches(self, rank: int, workers: int, batch_size: int, seed: int) -> Batches:
        """Random pictures of this rank's part."""
        part = shard(self.trained, rank=rank, workers=workers)
        if workers > self.trained:
            reason = f"there are {self.trained} training pictures, and each worker needs at least one; "
            raise BadArgument("workers", workers, f"{reason}use fewer workers or more data.", call="batches")
        change = augment if self.augmented else None
        return Batches(part, self.take, rank=rank, batch_size=batch_size, seed=seed, augment=change)

    def take(self, positions: Tensor) -> Batch:
        """The pictures at these positions, scaled to 0–1, and their labels."""
        return self.pictures[positions].float() / 255, self.labels[positions]

    def evaluate(self, model: nn.Module) -> float:
        """The mean loss over at most 1000 held-out pictures."""
        return self._average(model, partial(F.cross_entropy, reduction="sum"))

    def accuracy(self, model: nn.Module) -> float:
        """The share of the same pictures that the model classifies correctly."""
        return self._average(model, lambda logits, labels: (logits.argmax(1) == labels).sum())

    def _average(self, model: nn.Module, measure: Callable[[Tensor, Tensor], Tensor]) -> float:
        batches = map(self.take, torch.split(self.evaluated, AT_ONCE))
        sums = [measure(*predicted) for predicted in predict_all(model, batches)]
        return torch.stack(sums).sum().item() / self.count


@cache
def load_digits() -> tuple[Tensor, Tensor]:
    """All digits as bytes and their labels, in a fixed shuffled order."""
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"digits_task needs scikit-learn: {how_to_install('cli')}") from None
    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0), device="cpu")
    shades = torch.tensor(digits.images, dtype=torch.float32, device="cpu") * (255 / 16)
    labels = torch.tensor(digits.target, dtype=torch.int64, device="cpu")
    return shades.round().to(torch.uint8)[order, None], labels[order]


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Mirror half of the pictures, and shift each by up to an eighth of its width. Gaps are black."""
    pictures, labels = batch
    count, side = len(pictures), pictures.shape[-1]
    margin = max(1, side // 8)
    mirrored = torch.rand(count, generator=generator, device="cpu") < 0.5
    pictures = torch.where(mirrored[:, None, None, None], pictures.flip(-1), pictures)
    down, right = torch.randint(0, 2 * margin + 1, (2, count), generator=generator, device="cpu")
    along = torch.arange(side, device="cpu")
    rows, columns = (down[:, None] + along)[:, :, None], (right[:, None] + along)[:, None, :]
    numbers = torch.arange(count, device="cpu")[:, None, None]
    return F.pad(pictures, (margin,) * 4)[numbers, :, rows, columns].permute(0, 3, 1, 2), labels


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Layers built inside draw their weights from this seed. The global generator is untouched."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        yield


def build_convolutions(widths: tuple[int, int, int], *, seed: int) -> nn.Module:
    """Two convolutions, pooling and two linear layers. The seed fixes the weights."""
    first, second, hidden = widths
    with use_seed(seed):
        body = [nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3, padding=1)]
        head = [nn.Linear(second * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
        return nn.Sequential(*body, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *head)


class Block(nn.Module):
    """Two normalized convolutions with a residual connection. A stride of 2 halves the picture."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, stride=stride)
        self.second = convolution(outputs, outputs)
        changes = stride != 1 or inputs != outputs
        self.around = convolution(inputs, outputs, kernel=1, stride=stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.around(x))


def convolution(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def build_resnet(widths: tuple[int, ...], blocks: int, *, classes: int, seed: int) -> nn.Module:
    """`blocks` per width; each width works on half the pixels of the last. The seed fixes the weights."""
    with use_seed(seed):
        layers: list[nn.Module] = [nn.Sequential(convolution(3, widths[0]), nn.ReLU())]
        inputs = widths[0]
        for place, width in enumerate(widths):
            for number in range(blocks):
                layers.append(Block(inputs, width, stride=2 if place and not number else 1))
                inputs = width
        head = nn.Linear(inputs, classes)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
