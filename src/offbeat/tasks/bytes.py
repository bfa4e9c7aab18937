"""A byte-level GPT, by default trained on the source of Python's standard library."""

import os
import sys
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.base.errors import BadArgument
from offbeat.tasks.gpt import Shape, build_gpt
from offbeat.tasks.task import Batch, Batches, Task, evaluating, look_up_size, shard

SIZES = {
    "tiny": Shape(layers=2, width=96, heads=3, context=64),
    "small": Shape(layers=4, width=128, heads=4, context=128),
    "medium": Shape(layers=4, width=192, heads=6, context=128),
    "large": Shape(layers=6, width=384, heads=6, context=256),
}

SOURCE_BYTES = 4_000_000
HELD_OUT = 10  # the last tenth of the data
EVALUATED = 64  # windows, evenly spaced over the held-out part


def bytes_task(
    size: str = "small",
    *,
    data: str | os.PathLike[str] | None = None,
    context: int | None = None,
    seed: int = 0,
) -> Task:
    """Predict the next byte of a text with a GPT. Losses are in nats per byte; guessing gives ln 256 ≈ 5.55.

    ====== ========== ======= ===== ===== =======
    size   parameters tensors depth width context
    ====== ========== ======= ===== ===== =======
    tiny      254 784      30     2    96      64
    small     842 752      54     4   128     128
    medium  1 853 952      54     4   192     128
    large  10 844 928      78     6   384     256
    ====== ========== ======= ===== ===== =======

    The last tenth of the data is held out; `evaluate` is the loss on 64 windows of it. The rest is cut into
    one contiguous part per worker.

    Args:
        data: the path of a text. The default is the single-file modules of Python's standard library, sorted
            by name, up to 4 000 000 bytes, which are the same on all workers with the same Python.
        context: bytes the model sees, by default as in the table; each adds `width` parameters.
        seed: seeds the initial weights; batches take their own seed.

    Example:
        >>> task = bytes_task("tiny", seed=1)
        >>> task.evaluate(task.model())
    """
    shape = look_up_size("bytes_task", size, SIZES)
    if context is not None and context < 1:
        raise ValueError(f"bytes_task(context={context}): context must be at least 1.")
    shape = shape if context is None else replace(shape, context=context)
    text = Text(standard_library() if data is None else read(Path(data)), context=shape.context)
    return Task(
        name=f"bytes-{size}",
        model=partial(build_gpt, shape, seed=seed),
        loss=cross_entropy,
        batches=text.batches,
        evaluate=text.evaluate,
        unit="bytes",
        lr=3e-3,
        batch_size=8,
    )


class Text:
    """Training bytes and held-out bytes, read in windows of `context` inputs."""

    def __init__(self, content: bytes, *, context: int) -> None:
        held_out = len(content) // HELD_OUT
        if held_out <= context:
            raise ValueError(
                f"bytes_task(context={context}): the data has {len(content)} bytes and needs at least "
                f"{HELD_OUT * (context + 1)} to hold out one window; give more data or a smaller context."
            )
        self.context = context
        self.bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.trained = len(content) - held_out

    def batches(self, rank: int, workers: int, batch_size: int, seed: int) -> Batches:
        """Random windows from this rank's part of the training bytes."""
        part = shard(self.trained, rank=rank, workers=workers)
        # All ranks check the smallest part, so that they fail together.
        if self.trained // workers <= self.context:
            reason = f"each gets {self.trained // workers} bytes and needs at least {self.context + 1} "
            advice = "for one window; use fewer workers, more data or a smaller context."
            raise BadArgument("workers", workers, reason + advice, call="batches")
        starts = range(part.start, part.stop - self.context)
        return Batches(starts, self.windows, rank=rank, batch_size=batch_size, seed=seed)

    def evaluate(self, model: nn.Module) -> float:
        """The mean loss over the fixed windows of the held-out bytes."""
        room = len(self.bytes) - self.context - 1 - self.trained
        starts = self.trained + torch.arange(EVALUATED, device="cpu") * room // (EVALUATED - 1)
        with evaluating(model):
            losses = [cross_entropy(model, self.windows(part)) for part in starts.view(4, -1)]
        return torch.stack(losses).mean().item()

    def windows(self, starts: Tensor) -> Batch:
        """The inputs from each start, and the targets one byte later."""
        window = self.bytes[starts[:, None] + torch.arange(self.context + 1, device="cpu")].long()
        return window[:, :-1], window[:, 1:]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all bytes of −ln p(next byte), on the model's device."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def standard_library() -> bytes:
    """The first 4 MB of the standard library's single-file modules.

    Packages are left out: they hold the tests and generated tables.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    # The set leaves out generated modules that depend on the machine.
    modules = sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)
    return b"".join(path.read_bytes() for path in modules)[:SOURCE_BYTES]


def read(path: Path) -> bytes:
    if not path.is_file():
        raise BadArgument("data", str(path), "data must be the path of an existing file.", call="bytes_task")
    return path.read_bytes()
