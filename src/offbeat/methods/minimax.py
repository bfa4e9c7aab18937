"""Methods for problems with a minimum and a maximum."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Group
from offbeat.base.tensors import params
from offbeat.engine.exchange import Exchange
from offbeat.engine.stages import Stages
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.parts import Optimizers, Options, average, record_call
from offbeat.when import Schedule, schedule

__all__ = ["coda"]


@record_call
def coda(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 8,
    stages: int | Sequence[int] = 4000,
    gamma: float = 500.0,
    decay: float = 3.0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local steps of descent and ascent in stages, for the AUC: the model contains an `AUCLoss`.

        v ← (gamma·(v − lr·∇F) + lr·v₀)/(gamma + lr)        α ← α + lr·∇F        averaged every `every` steps

    v are the weights with the loss's a and b, and v₀ those at the beginning of the stage. At its end, v
    becomes its mean over the steps of the stage and the workers. The next iteration makes no step: from its
    scores comes a new α, the mean of the negatives' minus that of the positives'. Then the rate is divided by
    `decay`. `stages` is the length of the first stage, and each next one is `decay` times as long; or the
    lengths, of which the last has no end. Larger `gamma` pulls less; larger `every` communicates less.

        sync = offbeat.coda(model, optimizer, every=8)

    Guo et al., "Communication-Efficient Distributed Stochastic AUC Maximization with Deep Neural Networks",
    ICML 2020, arXiv 2005.02426. Differs from the paper: α comes from the scores of all workers together.
    """
    return Synchronizer(
        optimizer,
        [
            Stages(model, stages, gamma=gamma, decay=decay, among=group),
            Exchange(params(model), when=schedule(every), among=group, update=average(options), **options),
        ],
    )
