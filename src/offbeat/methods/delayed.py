"""Averaging methods that train while the message is in flight: each is one expression over the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from offbeat.among import Group, World
from offbeat.base.tensors import params
from offbeat.engine.exchange import Exchange
from offbeat.engine.round import Delay
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Optimizers, Options, recorded
from offbeat.methods.parts import average, correct
from offbeat.when import Schedule, schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["cocod", "dasgd"]


@recorded
def cocod(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 8,
    delay: Delay = 2,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD whose average lands `delay` steps late and keeps all of the worker's progress since.

        x ← x + mean(sent) − sent

    Larger `delay` hides a longer message and applies older results.

        sync = offbeat.cocod(model, optimizer, every=8, delay=4)

    Shen et al., "Faster Distributed Deep Net Training: Computation and Communication Decoupled SGD", IJCAI
    2019, arXiv 1906.12043.
    Differs from the paper, where a message has the whole period: that is delay="round".
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=schedule(every),
                among=World(group),
                update=correct(options),
                delay=delay,
                **options,
            )
        ],
    )


@recorded
def dasgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 8,
    delay: Delay = 2,
    keep: float = 0.5,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD whose average lands `delay` steps late and is blended with the worker's progress since.

        x ← keep·x + (1 − keep)·mean(sent)

    Larger `keep` keeps more of the worker's own progress; 0 drops the steps made during the delay.

        sync = offbeat.dasgd(model, optimizer, every=8, delay=2)

    Zhou et al., "DaSGD", 2020, arXiv 2006.00441.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=schedule(every),
                among=World(group),
                update=average(options, keep),
                delay=delay,
                **options,
            )
        ],
    )
