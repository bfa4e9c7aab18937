"""A small GPT: pre-norm blocks, learned positions, GELU, and the embedding matrix reused as the head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The dimensions of a GPT; `context` is the longest input, in tokens."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        hidden: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """Tokens of shape (batch, time) in, logits of shape (batch, time, vocabulary) out.

    Twelve tensors per block and six around them: token and position embeddings, and the weight and bias of
    the norms before the first block and after the last.
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
