"""Small training problems for simulated and real workers."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import torch
from table import OWN_CODES
from ticking import clocked
from torch import Tensor, nn

import offbeat


class Dyadic(nn.Module):
    """Parameters and data that are small integers times powers of two: every order of summation agrees.

    It has what packing must handle: two dtypes, a scalar, an empty, a non-contiguous, a frozen and a tied
    parameter, one without gradient, a floating and an integer buffer.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        quadratic, linear = nn.Parameter(integers(g, 3, 2).double()), nn.Parameter(integers(g, 5))
        self.first = nn.ParameterDict({"quadratic": quadratic, "linear": linear})
        self.scalar = nn.Parameter(integers(g))
        self.second = nn.ParameterDict({"turned": nn.Parameter(integers(g, 2, 4).t()), "tied": linear})
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.idle = nn.Parameter(integers(g, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("average", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, data: Tensor) -> Tensor:
        self.average.add_(data[:2].double()).mul_(0.5)
        self.count.add_(1 + int(data[0].abs()))
        pull = (self.first["quadratic"] - data[:6].view(3, 2)).square().sum() / 2
        flat = (self.second["tied"] * data[:5]).sum() + (self.second["turned"] * data[6]).sum()
        flat = flat + self.scalar * data[5]
        return pull + flat + self.empty.sum()


class Wide(Dyadic):
    """Has a tensor that is large enough for the default `least` of every code."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.wide = nn.Parameter(integers(torch.Generator().manual_seed(seed), 40, 32))

    def forward(self, data: Tensor) -> Tensor:
        # Slopes differ in size, so some values are larger than others.
        sizes = 1.0 + torch.arange(self.wide.numel()).remainder(13)
        slopes = data.repeat(self.wide.numel() // 7 + 1)[: self.wide.numel()] * sizes
        return super().forward(data) + (self.wide.flatten() * slopes).sum()


class Small(nn.Module):
    """Two layers of one number each, and a buffer: for tests of who waits for whom."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.first = nn.ParameterDict({"slope": nn.Parameter(integers(g))})
        self.second = nn.ParameterDict({"slope": nn.Parameter(integers(g))})
        self.register_buffer("average", torch.zeros(1))

    def forward(self, data: Tensor) -> Tensor:
        self.average.add_(data[:1]).mul_(0.5)
        return self.first["slope"] * data[0] + self.second["slope"] * data[1]


def integers(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=g).float()


@cache
def data(rank: int, step: int) -> Tensor:
    """A worker's batch of a step. It is drawn once: read it only."""
    return integers(torch.Generator().manual_seed(1000 * rank + step), 7)


class Realistic(nn.Module):
    """Floating point, BatchNorm and dropout; one tensor is large enough for any code."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.body = nn.Sequential(
            nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)
        )
        self.wide = nn.ParameterList([torch.randn(150, 7)])
        torch.set_rng_state(state)

    def forward(self, data: Tensor) -> Tensor:
        inputs = torch.stack([data.roll(i) for i in range(7)])
        loss = (self.body(inputs).squeeze(1) - data).square().mean()
        return loss + (self.wide[0] - data).square().sum() / 7


def optimizer_for(model: nn.Module, name: str = "sgd") -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.25)
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    assert name == "adamw"
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(these: dict[str, Tensor], those: dict[str, Tensor]) -> bool:
    return these.keys() == those.keys() and all(torch.equal(these[k], those[k]) for k in these)


def reloaded(*states: Any) -> list[Any]:
    """States as a file gives them back."""
    file = io.BytesIO()
    torch.save(list(states), file)
    file.seek(0)
    loaded: list[Any] = torch.load(file, weights_only=True)
    return loaded


def take_step(
    net: nn.Module, opt: torch.optim.Optimizer, sync: offbeat.Synchronizer, rank: int, step: int
) -> None:
    """One turn of a usual loop."""
    loss = net(data(rank, step))
    loss.backward()
    sync.observe(loss)
    sync.step()
    opt.zero_grad()


def problem(expression: str) -> type[nn.Module]:
    """A wide model for methods with a code of their own, a small and quicker one for others."""
    return Wide if expression in OWN_CODES else Dyadic


def train(
    comm: offbeat.Communicator,
    expression: str,
    *,
    steps: int = 10,
    model: type[nn.Module] | None = None,
    optimizer: str = "sgd",
    decay: float = 1.0,
    idle: int = 0,
    finish: bool = True,
    samples: tuple[float, ...] | None = None,
) -> list[dict[str, Tensor]]:
    """Weights and buffers of this worker after every step and `finish()`; the rate is 0 in `idle` steps.

    `samples` are those of every rank's steps.
    """
    net = (model or problem(expression))(seed=comm.rank)
    opt = optimizer_for(net, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0 if step < idle else decay**step)
    sync = offbeat.method(expression)(net, opt, group=clocked(comm, expression))
    trace = []
    for step in range(steps):
        loss = net(data(comm.rank, step))
        loss.backward()
        sync.observe(loss.square())
        sync.step(samples=None if samples is None else samples[comm.rank])
        opt.zero_grad()
        scheduler.step()
        trace.append(snapshot(net))
    if finish:
        sync.finish()
        trace.append(snapshot(net))
    return trace


@cache
def simulated(expression: str, *, workers: int = 4, **options: Any) -> list[list[dict[str, Tensor]]]:
    """The traces of `train` on simulated workers. They are computed once: read them only."""

    def worker(comm: offbeat.Communicator) -> list[dict[str, Tensor]]:
        torch.manual_seed(comm.rank)
        return train(comm, expression, **options)

    return offbeat.simulate(worker, workers)
