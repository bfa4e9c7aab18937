"""Learning-rate schedulers keep their pace in every method, wherever in the loop they step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Small, data, same, snapshot
from table import METHODS, enough
from ticking import clocked
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

import offbeat

STEPS = 7

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": lambda opt: schedulers.ExponentialLR(opt, 0.7),  # from the rate it finds
    "step": lambda opt: schedulers.StepLR(opt, 2, 0.3),
    "lambda": lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step)),  # from the first rate
    "cosine": lambda opt: schedulers.CosineAnnealingLR(opt, STEPS, eta_min=0.01),
    "one cycle": lambda opt: schedulers.OneCycleLR(opt, 0.3, total_steps=STEPS + 1, cycle_momentum=False),
    "chained": lambda opt: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(opt, 0.7), schedulers.ConstantLR(opt, 0.5, 3)], opt
    ),
    "plateau": lambda opt: schedulers.ReduceLROnPlateau(opt, factor=0.7, patience=0),
}
PLACES = ["after", "inside", "between"]


def trained(
    comm: offbeat.Communicator, expression: str | None, name: str, place: str
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The rates of two groups after each step, and the weights; without a method, a plain loop."""
    net = Small()
    *most, last = net.parameters()
    opt = torch.optim.SGD([{"params": most}, {"params": [last], "lr": 0.125}], lr=0.25)
    scheduler = SCHEDULERS[name](opt)
    forward = (lambda: scheduler.step(1.0)) if name == "plateau" else scheduler.step
    sync = (
        None if expression is None else offbeat.method(expression)(net, opt, group=clocked(comm, expression))
    )
    trace = []

    def local() -> None:
        opt.step()
        if place != "after":
            forward()

    for step in range(STEPS):
        loss = net(data(comm.rank, step))
        loss.backward()
        if sync is None:
            local()
        elif place == "between":
            sync.observe(loss)
            if sync.before_step():
                opt.step()
            else:
                vars(opt)["_opt_called"] = True
            forward()
            sync.after_step()
        else:
            sync.observe(loss)
            sync.step(local)
        if place == "after":
            forward()
        opt.zero_grad()
        trace.append([group["lr"] for group in opt.param_groups])
    if sync is not None:
        sync.finish()
    return trace, snapshot(net)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("expression", [row for row in METHODS if row.startswith("palsgd")])
def test_pulls_leave_schedulers_alone(expression: str, name: str) -> None:
    check(expression, name)


@pytest.mark.few(9)
@pytest.mark.parametrize("expression", [row for row in METHODS if not row.startswith("palsgd")])
def test_every_method_leaves_schedulers_alone(expression: str) -> None:
    check(expression, ("lambda", "exponential")[METHODS.index(expression) % 2])


def check(expression: str, name: str) -> None:
    plain, _ = trained(offbeat.Solo(), None, name, "after")

    def worker(comm: offbeat.Communicator) -> list[tuple[list[list[float]], dict[str, torch.Tensor]]]:
        return [trained(comm, expression, name, place) for place in PLACES]

    for results in offbeat.simulate(worker, enough(expression)):
        for place, (rates, weights) in zip(PLACES, results, strict=True):
            assert rates == plain, place
            # Where it steps makes no difference to the weights either: steps, pulls and rounds use the rate
            # that the step had.
            assert same(weights, results[0][1]), place
