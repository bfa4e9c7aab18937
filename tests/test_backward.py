"""Gradients that leave during the backward pass: the mean is the one of gradients that leave at the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Pool
from torch import Tensor, nn

import offbeat
from offbeat.engine import buckets
from offbeat.engine.buckets import Buckets
from offbeat.engine.exchange import Exchange

WIDTH = 2**16  # values of a layer: as many bytes as the shortest bucket
CODES = ["Quantized(4)", "ErrorFeedback(Quantized(4))", "ErrorFeedback(TopK(64))", "Mean('bfloat16')"]
METHODS = ["ddp()", *[f"ddp(reduce={code})" for code in CODES]]
Use = Callable[[int, int, int], float]  # by rank, step and layer: the slope there; 0: unused


class Layers(nn.Module):
    """Layers that are used one after the other. The gradient of layer i is the slope given for it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(WIDTH) for _ in range(layers)])
        self.spread = torch.arange(WIDTH).sub(WIDTH // 2).div(WIDTH)

    def forward(self, slopes: list[float]) -> Tensor:
        out = torch.zeros(())
        for layer, slope in zip(self.layers, slopes, strict=True):
            out = out + (layer * self.spread).sum() * slope if slope else out
        return out


def slope(rank: int, step: int, layer: int) -> float:
    """Multiples of a quarter, so that sums are exact."""
    return (1 + rank + 2 * step + 3 * layer) / 4


class Run:
    """A worker of `ddp` that can look into its buckets."""

    def __init__(
        self, comm: offbeat.Communicator, expression: str = "ddp()", *, use: Use = slope, late: bool = False
    ) -> None:
        self.net, self.comm, self.use, self.late, self.steps = Layers(), comm, use, late, 0
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.sync = offbeat.method(expression)(self.net, self.opt, group=comm)
        exchange = self.sync.parts[0]
        assert isinstance(exchange, Exchange)
        assert isinstance(exchange.sender, Buckets)
        self.sender = exchange.sender
        self.left: list[int] = []  # buckets that had left before each step

    def backward(self, scale: float = 1.0) -> None:
        slopes = [scale * self.use(self.comm.rank, self.steps, layer) for layer in range(4)]
        if self.late:
            with self.sync.accumulate():
                self.net(slopes).backward()
        else:
            self.net(slopes).backward()

    def step(self, **options: Any) -> None:
        self.left.append(len(self.sender._air))
        self.sync.step(**options)
        self.opt.zero_grad()
        self.steps += 1

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self.backward()
            self.step()
        return self

    def weights(self) -> list[Tensor]:
        return [layer.detach().clone() for layer in self.net.layers]

    def load(self, other: Run) -> Run:
        self.net.load_state_dict(other.net.state_dict())
        self.sync.load_state_dict(other.sync.state_dict())
        self.steps = other.steps
        return self


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def alike(worker: Callable[[offbeat.Communicator], list[Tensor]], expected: list[Tensor]) -> None:
    """Every simulated worker ends with these weights."""
    for weights in offbeat.simulate(worker, 3):
        assert equal(weights, expected)


def plain(expression: str = "ddp()", steps: int = 4, **options: Any) -> list[Tensor]:
    """The weights after some steps whose gradients leave at the step."""
    return offbeat.simulate(lambda comm: Run(comm, expression, late=True, **options).go(steps).weights(), 3)[
        0
    ]


# The mean does not depend on when a bucket leaves.


@pytest.mark.parametrize("expression", METHODS)
def test_a_mean_does_not_depend_on_when_its_buckets_leave(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm, expression).go(4)
        assert run.left == [0, 3, 3, 3]  # the first step teaches which gradients there are
        return run.weights()

    alike(worker, plain(expression))


def test_a_mean_in_buckets_is_that_of_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(comm: offbeat.Communicator) -> list[Tensor]:
        net = Layers()
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        with offbeat.ddp(net, opt, group=comm) as sync:
            assert not isinstance(sync.parts[0].sender, Buckets)
            for step in range(4):
                net([slope(comm.rank, step, layer) for layer in range(4)]).backward()
                sync.step()
                opt.zero_grad()
        return [layer.detach() for layer in net.layers]

    in_buckets = plain()
    monkeypatch.setattr(buckets, "_LEAST", 2**30)
    assert equal(offbeat.simulate(whole, 3)[0], in_buckets)


def test_the_mean_in_numbers() -> None:
    """x = −½ Σ spread·mean of the slopes, whose mean over three ranks is that of rank 1."""
    spread = Layers().spread
    for layer, weights in enumerate(plain()):
        total = sum(slope(1, step, layer) for step in range(4))
        assert torch.equal(weights, -0.5 * total * spread)


def real(comm: offbeat.Communicator, expression: str) -> tuple[list[Tensor], list[int]]:
    run = Run(comm, expression).go(3)
    run.sync.finish()
    return run.weights(), run.left


@pytest.mark.parametrize("expression", METHODS)
def test_simulation_equals_gloo_to_the_bit(pool: Pool, expression: str) -> None:
    expected = offbeat.simulate(lambda comm: real(comm, expression), 4)
    for (weights, left), (others, _) in zip(pool.run(real, expression), expected, strict=True):
        assert equal(weights, others)
        assert left == [0, 3, 3]
