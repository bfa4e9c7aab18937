"""Measure when an exchange leaves the workers equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat import Synchronizer
from offbeat.among import World
from offbeat.base.clock import Clock
from offbeat.base.tensors import grads, params
from offbeat.comm.communicator import Communicator
from offbeat.engine.exchange import Exchange
from offbeat.engine.weights import checksum
from offbeat.plan.job import Job
from offbeat.plan.proxy_model import WIDTHS, ProxyModel, local_optimizer
from offbeat.reduce import Reducer
from offbeat.simulate import simulate
from offbeat.when import Every


@dataclass(frozen=True)
class Equality:
    """Whether an exchange of the whole model leaves its workers equal."""

    after_round: bool  # one that lands without a delay
    after_flush: bool  # whatever the workers did since the last round


def measure_equality(part: Exchange, job: Job) -> Equality:
    """Try an exchange on two simulated workers with different gradients."""

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
    return Equality(first[0] == second[0], first[1] == second[1] and not part.live.early)
