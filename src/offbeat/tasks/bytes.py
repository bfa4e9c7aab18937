"""A byte-level GPT, by default trained on the source of Python's standard library."""

import os
import sys
import sysconfig
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.base.errors import BadArgument
from offbeat.tasks.task import Batch, Batches, FilePath, Task, cross_entropy, find_size, predict_all, shard


@dataclass(frozen=True)
class Shape:
    """The dimensions of a GPT; `context` is the longest input, in tokens."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256


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
    size: str = "small", *, data: FilePath | None = None, context: int | None = None, seed: int = 0
) -> Task:
    """Predict the next byte of a text with a GPT. Losses are in nats per byte; guessing gives ln 256 ≈ 5.55.

    The models: "tiny" (254 784 parameters, context 64), "small" (842 752, 128), "medium" (1 853 952, 128) and
    "large" (10 844 928, 256). `context` is the number of bytes the model sees; each adds `width` parameters.
    `seed` fixes the initial weights; batches take their own.

    `data` is the path of a text. The default is the single-file modules of Python's standard library, sorted
    by name, up to 4 000 000 bytes: the same on all workers with the same Python. The last tenth is held out;
    `evaluate` is the loss on 64 windows of it. The rest is cut into one contiguous part per worker.

        task = bytes_task("tiny", seed=1)
        task.evaluate(task.model())
    """
    shape = find_size("bytes_task", size, SIZES)
    if context is not None and context < 1:
        raise ValueError(f"bytes_task(context={context}): context must be at least 1.")
    if data is not None and not os.path.isfile(data):
        bad = "data must be the path of an existing file."
        raise BadArgument("data", os.fspath(data), bad, call="bytes_task")
    shape = replace(shape, context=context or shape.context)
    text = Text(standard_library() if data is None else Path(data).read_bytes(), context=shape.context)
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
            needs = f"needs at least {HELD_OUT * (context + 1)} to hold out one window"
            why = f"the data has {len(content)} bytes and {needs}; give more data or a smaller context."
            raise ValueError(f"bytes_task(context={context}): {why}")
        self.context, self.trained = context, len(content) - held_out
        self.bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8)

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
        predicted = predict_all(model, map(self.windows, starts.view(4, -1)))
        return torch.stack([F.cross_entropy(*pair) for pair in predicted]).mean().item()

    def windows(self, starts: Tensor) -> Batch:
        """The inputs from each start, and the targets one byte later."""
        window = self.bytes[starts[:, None] + torch.arange(self.context + 1, device="cpu")].long()
        return window[:, :-1], window[:, 1:]


def standard_library() -> bytes:
    """The first 4 MB of the standard library's single-file modules. Packages hold tests and tables."""
    folder = Path(sysconfig.get_path("stdlib"))
    # The set leaves out generated modules that depend on the machine.
    modules = sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)
    return b"".join(path.read_bytes() for path in modules)[:SOURCE_BYTES]


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Tokens of shape (batch, time) in, logits of shape (batch, time, vocabulary) out.

    Pre-norm blocks, learned positions, GELU, and the embedding matrix reused as the head.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.first_norm = nn.LayerNorm(shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last_norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first_norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last_norm(x), self.tokens.weight)


def build_gpt(shape: Shape, *, seed: int) -> GPT:
    """A GPT initialised as GPT-2; shape and seed fix the weights.

    Matrices are normal with deviation 0.02; those that write to the residual stream are divided by
    √(2 · layers), so that its variance at the end does not grow with depth. Biases are 0, norms are 1.
    """
    # On the meta device the layers draw nothing, so the global generator is untouched.
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
        else:
            scale = (2 * shape.layers) ** -0.5 if name.endswith("out.weight") else 1.0
            nn.init.normal_(parameter, std=0.02 * scale, generator=generator)
    return model
