"""Methods made for what is sent: each is one expression over the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from offbeat.among import Group, World
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.averages import average
from offbeat.methods.call import Extras, Optimizers, Options, recorded
from offbeat.reduce import Code, ErrorFeedback, RandomBlock, TopK, TwoLevel
from offbeat.update.detached import Detached
from offbeat.update.outer import SGD, Outer
from offbeat.when import Every, Schedule, schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["a2sgd", "def_sgd", "sparse_loco"]


@recorded
def a2sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Every step two numbers are averaged for the whole gradient; parameters every so many steps.

        g ← g + (mean(μ₊) − μ₊) where g ≥ 0        g ← g − (mean(μ₋) − μ₋) elsewhere

    μ₊ and μ₋ are the mean magnitudes of the two sides of the worker's own gradient. Two numbers hold the
    workers together but loosely: it is the averages of parameters that make them one model. Larger `every`
    communicates less.

        sync = offbeat.a2sgd(model, optimizer, every=32)

    Yoon et al., "A2SGD", 2020, arXiv 2006.07405.
    Differs from the paper, which has no averages of parameters in between.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(grads(model), when=Every(1), among=World(group), reduce=TwoLevel(), buffers="keep"),
            Exchange(
                params(model),
                when=schedule(every),
                among=World(group),
                update=average(options),
                **options,
            ),
        ],
    )


@recorded
def def_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    ratio: int = 64,
    lam: float = 0.3,
    every: int | Schedule = 1,
    seed: int = 0,
    reduce: Code | None = None,
    group: Group = None,
    **extras: Unpack[Extras],
) -> Synchronizer:
    """A `ratio`-th of the way from the anchor is sent; workers stand beside it by a part of what was not.

        Δ = (a − x) + (1 − lam)·e        a ← a − mean(code(Δ))        e ← Δ − code(Δ)        x ← a − lam·e

    The code is `RandomBlock(ratio, seed)`, or `reduce`. Larger `lam` takes gradients nearer to where the
    worker would be had its error arrived; lam=0 is error feedback. Larger `ratio` sends less.

        sync = offbeat.def_sgd(model, optimizer, ratio=64)

    Xu & Huang, "Detached Error Feedback for Distributed SGD with Random Sparsification", 2020,
    arXiv 2004.05298.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=schedule(every),
                among=World(group),
                update=Detached(RandomBlock(ratio, seed) if reduce is None else reduce, lam),
                **extras,
            )
        ],
    )


@recorded
def sparse_loco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 30,
    ratio: int = 64,
    decay: float = 0.95,
    lr: float = 1.0,
    group: Group = None,
    **extras: Unpack[Extras],
) -> Synchronizer:
    """DiLoCo that sends the largest 64 of each 4 096 values, in 2 bits; error feedback is its momentum.

        e ← decay·e + (a − x)        q = code(e)        e ← e − q        a ← a − lr·mean(q)        x ← a

    Larger `ratio` sends less; larger `decay` remembers longer what was not sent.

        sync = offbeat.sparse_loco(model, optimizer, every=30)

    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv 2508.15706.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=schedule(every),
                among=World(group),
                reduce=ErrorFeedback(TopK(ratio, chunk=4096, bits=2), decay),
                update=Outer(SGD(lr)),
                **extras,
            )
        ],
    )
