"""Methods that send a few of the values, and remember the others."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Group
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.parts import Extras, Optimizers, record_call, synchronize
from offbeat.reduce import Code, ErrorFeedback, RandomBlock, TopK
from offbeat.update.outer import SGD, Outer
from offbeat.update.update import Detached
from offbeat.when import Schedule

__all__ = ["def_sgd", "sparse_loco"]


@record_call
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
    return synchronize(
        model,
        optimizer,
        every,
        Detached(RandomBlock(ratio, seed) if reduce is None else reduce, lam),
        group,
        **extras,
    )


@record_call
def sparse_loco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 30,
    ratio: int = 64,
    decay: float = 0.95,
    lr: float = 1.5,
    group: Group = None,
    **extras: Unpack[Extras],
) -> Synchronizer:
    """DiLoCo that sends the largest 64 of each 4 096 values, in 2 bits; error feedback acts as its momentum.

        e ← decay·e + (a − x)        q = code(e)        e ← e − q        a ← a − lr·mean(q)        x ← a

    Larger `ratio` sends less; larger `decay` remembers unsent values longer; larger `lr` takes longer steps.
    The paper's `lr` is 1.0: use it if the local optimizer is SGD with a large rate.

        sync = offbeat.sparse_loco(model, optimizer, every=30)

    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv 2508.15706.
    """
    return synchronize(
        model,
        optimizer,
        every,
        Outer(SGD(lr)),
        group,
        reduce=ErrorFeedback(TopK(ratio, chunk=4096, bits=2), decay),
        **extras,
    )
