"""Methods built around a code: each is one expression over the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from offbeat.among import Group, World
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Extras, Optimizers, Options, recorded
from offbeat.methods.parts import average
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
    """Averages two numbers for the whole gradient at every step, and parameters every `every` steps.

        g ← g + (mean(μ₊) − μ₊) where g ≥ 0        g ← g − (mean(μ₋) − μ₋) elsewhere

    μ₊ and μ₋ are the mean magnitudes of the worker's own gradient on the two sides. They keep the workers
    together only loosely; the averages of parameters make them one model. Larger `every` communicates less.

        sync = offbeat.a2sgd(model, optimizer, every=32)

    Yoon et al., "A2SGD", 2020, arXiv 2006.07405.
    Differs from the paper, which does not average parameters in between.
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
    """Sends 1/`ratio` of the displacement from the anchor; workers are offset by part of their unsent error.

        Δ = (a − x) + (1 − lam)·e        a ← a − mean(code(Δ))        e ← Δ − code(Δ)        x ← a − lam·e

    Larger `ratio` sends less. Larger `lam` takes gradients closer to where the worker would be if its error
    had arrived; 0 is error feedback. The code is `RandomBlock(ratio, seed)` unless `reduce` gives another.

        sync = offbeat.def_sgd(model, optimizer, ratio=64)

    Xu & Huang, "Detached Error Feedback for Distributed SGD with Random Sparsification", 2020, arXiv
    2004.05298.
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
    """DiLoCo that sends the largest 64 of each 4 096 values, in 2 bits; error feedback acts as its momentum.

        e ← decay·e + (a − x)        q = code(e)        e ← e − q        a ← a − lr·mean(q)        x ← a

    Larger `ratio` sends less; larger `decay` remembers unsent values for longer; larger `lr` takes longer
    outer steps.

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
