"""A small model in place of the real one, and whether an exchange leaves it equal on all workers."""

from __future__ import annotations

import torch
from torch import nn

from offbeat import Synchronizer
from offbeat.among import World
from offbeat.base.clock import Clock
from offbeat.base.tensors import grads, params
from offbeat.comm.communicator import Communicator
from offbeat.engine.exchange import Exchange
from offbeat.engine.weights import checksum
from offbeat.plan.job import Job
from offbeat.reduce import Reducer
from offbeat.simulate import simulate
from offbeat.when import Every

WIDTHS = (64, 128, 192)  # bytes are quadratic in the width, so three widths give any other


class ProxyModel(nn.Module):
    """Equal square layers in the dtype of the job. Every weight has a gradient."""

    def __init__(self, job: Job, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(job.layers):
            weight = nn.Parameter(torch.full((width, width), 0.5, dtype=getattr(torch, job.dtype)))
            weight.grad = torch.full_like(weight, 0.25)
            self.layers.append(nn.ParameterList([weight]))


def local_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    rate = job.rate(0) or 1e-3
    if job.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if job.optimizer == "momentum" else 0.0)


def measure_equality(part: Exchange, job: Job) -> tuple[bool, bool]:
    """Whether an exchange of the whole model leaves two simulated workers with other gradients equal.

    The first answer is for a round that lands without a delay, the second for `flush`, whatever the workers
    did since the last round.
    """

    def train(comm: Communicator) -> tuple[int, int]:
        model = ProxyModel(job, WIDTHS[0])
        weights, optimizer = list(model.parameters()), local_optimizer(job, model)
        for p in weights:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(comm.rank)).to(p.dtype)
        exchange = Exchange(
            grads(model) if part.live.early else params(model),
            when=Every(1),
            among=World(comm),
            reduce=None if isinstance(part.update, Reducer) else part.reduce,
            update=part.update,
        )
        Synchronizer(optimizer, [exchange]).step()
        after_round = checksum(weights)
        optimizer.step()
        exchange.flush(Clock(step=1, round=1, lr=0.0))
        return after_round, checksum(weights)

    first, second = simulate(train, workers=2)
    return first[0] == second[0], first[1] == second[1] and not part.live.early
