"""Workers on straight slopes: gradients do not depend on the weights, so rules can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import offbeat

Method = str | Callable[..., offbeat.Synchronizer]


class Slopes(nn.Module):
    """Parameters that begin at 0, in float64; each is a layer."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList([torch.zeros(1).double()]) for _ in range(layers))

    def forward(self, slope: float) -> Tensor:
        return slope * torch.stack([weight for layer in self.layers for weight in layer]).sum()

    @property
    def weights(self) -> list[float]:
        return [weight.item() for layer in self.layers for weight in layer]


def odd(rank: int, step: int) -> float:
    """1 for rank 0, 3 for rank 1, 5 for rank 2."""
    return 2.0 * rank + 1.0


class Walk:
    """One worker's training loop."""

    def __init__(
        self,
        comm: offbeat.Communicator,
        method: Method,
        *,
        slope: Callable[[int, int], float] = odd,
        lr: float | Callable[[int], Sequence[float]] = 1.0,
        layers: int = 1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.rank, self.slope, self.steps = comm.rank, slope, 0
        self.rates = lr if callable(lr) else lambda step: [lr] * layers
        self.net = Slopes(layers)
        groups = [{"params": layer.parameters(), "lr": 1.0} for layer in self.net.layers]
        self.opt = optimizer(groups)
        build = offbeat.method(method) if isinstance(method, str) else method
        self.sync = build(self.net, self.opt, group=comm)

    def go(self, steps: int = 1) -> list[float]:
        """The first weight after each of so many gradient steps."""
        trace = []
        for _ in range(steps):
            for group, lr in zip(self.opt.param_groups, self.rates(self.steps), strict=True):
                group["lr"] = lr
            self.net(self.slope(self.rank, self.steps)).backward()
            self.sync.step()
            self.opt.zero_grad()
            self.steps += 1
            trace.append(self.weight)
        return trace

    @property
    def weight(self) -> float:
        return self.net.weights[0]

    def finish(self) -> float:
        self.sync.finish()
        return self.weight

    def shown(self) -> float:
        with self.sync.averaged():
            return self.weight

    @property
    def rounds(self) -> list[int]:
        return [report.step for report in self.sync.reports]

    def state(self, part: int = 0) -> dict[str, Any]:
        """What the update of an exchange remembers."""
        saved = self.sync.state_dict()["parts"][part]
        return saved.get("shard", saved)["states"]["update"]  # a group's own, or everyone's


def walked(method: Method, steps: int, *, workers: int = 2, **options: Any) -> list[list[float]]:
    """The first weight of every worker after each step and `finish()`."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        walk = Walk(comm, method, **options)
        return [*walk.go(steps), walk.finish()]

    return offbeat.simulate(worker, workers)


def composed(update: offbeat.Update, every: int = 2, **options: Any) -> Method:
    """A method of one exchange of parameters."""

    def build(
        model: nn.Module, optimizer: torch.optim.Optimizer, group: offbeat.Communicator
    ) -> offbeat.Synchronizer:
        exchange = offbeat.Exchange(
            offbeat.params(model), when=offbeat.Every(every), among=group, update=update, **options
        )
        return offbeat.Synchronizer(optimizer, [exchange])

    return build
