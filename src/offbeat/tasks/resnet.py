"""A small residual network with batch normalization."""

import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.tasks.task import seeded


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
    with seeded(seed):
        stem = nn.Sequential(convolution(3, widths[0]), nn.ReLU())
        body: list[nn.Module] = []
        inputs = widths[0]
        for place, width in enumerate(widths):
            for number in range(blocks):
                body.append(Block(inputs, width, stride=2 if place and not number else 1))
                inputs = width
        return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
