"""What the workers learn: scikit-learn's digits, in a small network that also counts its own progress."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from offbeat import Butterfly, Communicator, Every, Exchange, Synchronizer, World, params

STEP = 0.020  # seconds a gradient takes at least
DELAY = 8 * STEP  # seconds more for a random quarter of the workers
BATCH = 32
LR = 0.05  # at first; it falls to 0


class Net(nn.Module):
    """A small network, and a number that grows by one with every step that is not lost."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
            self.body = nn.Sequential(*hidden, nn.Linear(256, 10))
        self.way = nn.Parameter(torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


def sgd(net: Net) -> torch.optim.SGD:
    return torch.optim.SGD(
        [
            {"params": net.body.parameters(), "lr": LR, "momentum": 0.9},
            {"params": [net.way], "lr": 1.0},
        ]
    )


class Digits:
    """A fifth is held out, the rest is dealt to the workers."""

    def __init__(self, rank: int, size: int) -> None:
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, train = order[:360], order[360:]
        self.held_out = images[test], labels[test]
        self.learnt = images[train], labels[train]
        self._images, self._labels, self._mine = images, labels, train[rank::size]

    def batch(self, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = self._mine[torch.randint(len(self._mine), (size,), generator=draw)]
        return self._images[chosen], self._labels[chosen]


def blocking(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: Communicator | None = None
) -> Synchronizer:
    """The same averages as those of wagma, each of them waited for."""
    return Synchronizer(
        optimizer,
        [
            Exchange(params(model), when=Every(1, skip=10), among=Butterfly(group=group), drift=False),
            Exchange(params(model), when=Every(10), among=World(group), drift=False),
        ],
    )
