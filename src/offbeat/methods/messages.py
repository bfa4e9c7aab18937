"""Methods that hide the message behind computation, or make it smaller: one expression each."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Group
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.round import Delay
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Extras, Optimizers, Options, record_call
from offbeat.methods.parts import average, correct, exchange_params
from offbeat.reduce import Code, ErrorFeedback, RandomBlock, TopK, TwoLevel
from offbeat.update.outer import SGD, Outer, Overlap
from offbeat.update.update import Detached
from offbeat.when import Every, Schedule, schedule

__all__ = ["a2sgd", "cocod", "dasgd", "def_sgd", "overlap_local_sgd", "sparse_loco"]


@record_call
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
    return exchange_params(model, optimizer, every, correct(options), group, delay=delay, **options)


@record_call
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
    return exchange_params(model, optimizer, every, average(options, keep), group, delay=delay, **options)


@record_call
def overlap_local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 2,
    pull: float = 0.6,
    momentum: float = 0.7,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Workers are pulled toward an anchor z, which they agree on while they train.

        x ← (1 − pull)·x + pull·z        v ← momentum·v + (z − x)        send z − v: its mean is the next z

    A message has a whole period to arrive. Larger `pull` keeps the workers closer together; larger `momentum`
    remembers more rounds.

        sync = offbeat.overlap_local_sgd(model, optimizer, every=2)

    Wang et al., "Overlap Local-SGD", ICASSP 2020, arXiv 2002.09539.
    """
    return exchange_params(model, optimizer, every, Overlap(pull, momentum), group, delay="round", **options)


@record_call
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
            Exchange(grads(model), when=Every(1), among=group, reduce=TwoLevel(), buffers="keep"),
            Exchange(params(model), when=schedule(every), among=group, update=average(options), **options),
        ],
    )


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
    return exchange_params(
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
    return exchange_params(
        model,
        optimizer,
        every,
        Outer(SGD(lr)),
        group,
        reduce=ErrorFeedback(TopK(ratio, chunk=4096, bits=2), decay),
        **extras,
    )
