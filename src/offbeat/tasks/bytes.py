"""The byte-level GPT, by default on the Python standard library's own source."""

import os
import sys
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.tasks.gpt import Shape, build_gpt
from offbeat.tasks.task import Batch, Batches, Task, evaluating, shard

SIZES = {
    "tiny": Shape(layers=2, width=96, heads=3, context=64),
    "small": Shape(layers=4, width=128, heads=4, context=128),
    "medium": Shape(layers=4, width=192, heads=6, context=128),
    "large": Shape(layers=6, width=384, heads=6, context=256),
}

SOURCE_BYTES = 4_000_000
HELD_OUT = 10  # one part in so many, at the end of the data
EVALUATED = 64  # windows, evenly spaced over the held-out part


def bytes_task(
    size: str = "small",
    *,
    data: str | os.PathLike[str] | None = None,
    context: int | None = None,
    seed: int = 0,
) -> Task:
    """Predict the next byte of a text with a GPT; losses are in nats per byte, ln 256 ≈ 5.55 knows nothing.

    ====== ========== ======= ===== ===== =======
    size   parameters tensors depth width context
    ====== ========== ======= ===== ===== =======
    tiny      254 784      30     2    96      64
    small     842 752      54     4   128     128
    medium  1 853 952      54     4   192     128
    large  10 844 928      78     6   384     256
    ====== ========== ======= ===== ===== =======

    The last tenth of the data is held out, and the loss on 64 windows of it is `evaluate`. The rest is cut
    into one contiguous part per worker.

    Args:
        data: the path of a text; by default the single-file modules of the running Python's standard
            library, sorted by name, up to 4 000 000 bytes: the same on all workers with the same Python.
        context: bytes the model looks back, by default as in the table; it adds `width` parameters each.
        seed: of the initial weights. Batches take their own.

    Example:
        >>> task = bytes_task("tiny", seed=1)
        >>> task.evaluate(task.model())
    """
    if size not in SIZES:
        known = ", ".join(repr(name) for name in SIZES)
        raise ValueError(f"bytes_task(size={size!r}): size must be one of {known}.")
    if context is not None and context < 1:
        raise ValueError(f"bytes_task(context={context}): context must be at least 1.")
    shape = SIZES[size] if context is None else replace(SIZES[size], context=context)
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
    """Bytes to train on and bytes held out, both read through windows of `context` inputs."""

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
        """Random windows that lie wholly in this rank's part of the training bytes."""
        part = shard(self.trained, rank=rank, workers=workers)
        # The smallest part decides, not this rank's, so that all ranks fail together.
        if self.trained // workers <= self.context:
            raise ValueError(
                f"batches(workers={workers}): each gets {self.trained // workers} bytes and needs at least "
                f"{self.context + 1} for one window; use fewer workers, more data or a smaller context."
            )
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
        """The inputs from each start, and the same one byte later."""
        window = self.bytes[starts[:, None] + torch.arange(self.context + 1, device="cpu")].long()
        return window[:, :-1], window[:, 1:]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all bytes of −ln p(next byte), on the model's device."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def standard_library() -> bytes:
    """The first 4 MB of the standard library's single-file modules.

    Packages stay out: they are where tests and generated tables live.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    # The folder may also hold generated modules that depend on the machine; they are not in this set.
    modules = sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)
    return b"".join(path.read_bytes() for path in modules)[:SOURCE_BYTES]


def read(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"bytes_task(data={str(path)!r}): data must be the path of an existing file.")
    return path.read_bytes()
