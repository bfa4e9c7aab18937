"""Averaging methods, simplest first: each is one expression over the parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Group, Subgroups
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.round import Delay
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.parts import Optimizers, Options, average, correct, exact, record_call, synchronize
from offbeat.reduce import Reducer, TwoLevel
from offbeat.update.update import Update
from offbeat.when import QSR, AdaComm, Adaptive, Every, Schedule, schedule

__all__ = ["a2sgd", "adacomm", "adaptive", "cocod", "dasgd", "ddp", "hierarchical", "local_sgd"]
__all__ += ["post_local_sgd", "qsr"]


@record_call
def ddp(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    delay: int = 0,
    reduce: Reducer | None = None,
    group: Group = None,
) -> Synchronizer:
    """Averages gradients before every step; buffers follow rank 0. The synchronous baseline.

        g ← mean(g)                        without delay
        g ← mean of the last step's g      with delay=1: the mean has a whole step to arrive

    Gradients are sent in buckets during the backward pass, as in `DistributedDataParallel`. With delay=1 step
    n moves along the gradient at the weights before step n − 1. The first step uses zeros, and `finish()`
    drops the last mean. SGD with momentum β is stable on a curvature λ if lr·λ < 1 − β; without delay, if
    lr·λ < 2 + 2β. On a small GPT the delay cost 10 % of the loss at `ddp()`'s rate, 2 % at a third of it.

        sync = offbeat.ddp(model, optimizer)
        sync = offbeat.ddp(model, optimizer, delay=1)
    """
    live = grads(model, own=False)
    gradients = Exchange(live, when=Every(1), among=group, reduce=reduce, delay=delay, buffers="follow")
    return Synchronizer(optimizer, [gradients])


@record_call
def local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 8,
    delay: Delay = 0,
    gain: float | None = None,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Workers step alone; their parameters are averaged every `every` steps.

        x ← mean(x)                           without delay
        x ← x + gain·(mean(sent) − sent)      with delay: keeps the steps made while the message was in flight

    Larger `every` communicates less and lets the workers drift further apart. With a delay, a larger `gain`
    removes more of the differences between the workers where the loss is flat, and overshoots where it is
    steep, since the steps in flight have already removed some of them there. The default is 0.25; with
    `ErrorFeedback` it is 1.0, which is `cocod`. A lossy `reduce` sends differences from an anchor, which
    takes one more copy of the model.

        sync = offbeat.local_sgd(model, optimizer, every=8)
        sync = offbeat.local_sgd(model, optimizer, every=8, delay=4)

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767.
    """
    late = correct(options, gain)  # refuses a bad gain, also without a delay
    return synchronize(
        model, optimizer, every, late if delay else average(options), group, delay=delay, **options
    )


@record_call
def post_local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    switch: int,
    every: int | Schedule = 8,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Averages gradients for the first `switch` steps, then parameters every `every` steps.

        step ≤ switch:  g ← mean(g)
        after:          x ← mean(x)        first after step switch + every

    Larger `switch` keeps more of the run synchronous, which helps while the weights change fast.

        sync = offbeat.post_local_sgd(model, optimizer, switch=1000, every=8)

    Lin et al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020, arXiv 1808.07217.
    """
    return synchronize(model, optimizer, every, average(options), group, warmup=switch, **options)


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
    2019, arXiv 1906.12043. Differs from the paper, where a message has the whole period: delay="round".
    """
    return synchronize(model, optimizer, every, correct(options), group, delay=delay, **options)


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
    return synchronize(model, optimizer, every, average(options, keep), group, delay=delay, **options)


@record_call
def hierarchical(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    nodes: int | Sequence[Sequence[int]],
    inner: int = 1,
    outer: int = 8,
    update: Update | None = None,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Averages parameters inside a node every `inner` steps, and among all workers every `outer` steps.

        x ← mean over the node(x)          after multiples of inner that are not multiples of outer
        x ← mean(x)                        after multiples of outer

    `nodes` is the number of ranks per node, or a list of the ranks of each node. `update` replaces the global
    average, for example by an `Outer` step. A lossy `reduce` applies to the global rounds only.

        sync = offbeat.hierarchical(model, optimizer, nodes=8, inner=1, outer=16)

    Lin et al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020, arXiv 1808.07217.
    Differs from the paper, which counts the outer period in inner rounds: here both are steps.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model), when=Every(inner, skip=outer), among=Subgroups(nodes, group), **exact(options)
            ),
            Exchange(
                params(model), when=Every(outer), among=group, update=update or average(options), **options
            ),
        ],
    )


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

    Yoon et al., "A2SGD", 2020, arXiv 2006.07405. The paper does not average parameters in between.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(grads(model), when=Every(1), among=group, reduce=TwoLevel(), buffers="keep"),
            Exchange(params(model), when=schedule(every), among=group, update=average(options), **options),
        ],
    )


@record_call
def qsr(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    alpha: float,
    base: int = 4,
    warmup: int = 0,
    peak: float | None = None,
    total: int | None = None,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD whose period grows as the learning rate decays.

        H = max(base, ⌊(alpha / lr)²⌋)     with the lr of the period's first step

    `QSR` describes the arguments. Larger `alpha` communicates less.

        sync = offbeat.qsr(model, optimizer, alpha=0.0175, base=4, warmup=10_000, peak=0.008)

    Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024, arXiv 2310.14423.
    """
    return synchronize(
        model, optimizer, QSR(alpha, base, warmup, peak, total), average(options), group, **options
    )


@record_call
def adaptive(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sample: int,
    start: int = 4,
    warmup: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD whose period grows while the workers stay closer together than the learning rate explains.

        C = mean of S/γ over the rounds from warmup to sample      S = mean |x − x̄|², the drift; γ the lr
        S < 0.7 γ C: period + 1        S > 1.3 γ C: period − 1, at least 1

    Until step `sample`, about a quarter of the run, the period is `start`. Larger `start` communicates less.

        sync = offbeat.adaptive(model, optimizer, start=4, sample=1000)

    Jiang & Agrawal, "Adaptive Periodic Averaging", 2020, arXiv 2007.06134.
    """
    return synchronize(model, optimizer, Adaptive(start, sample, warmup), average(options), group, **options)


@record_call
def adacomm(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    start: int,
    interval: int,
    warmup: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD whose period shrinks as the loss falls. The loop passes in the loss.

        τ' = max(1, ⌈√(γ₀/γ · F/F₀) · start⌉)        τ ← τ' if it is smaller, else ⌈τ/2⌉

    F is the mean loss of an `interval` over all workers; F₀ and γ₀ are the loss and the last lr of the first
    interval after `warmup`. Larger `start` communicates less; larger `interval` keeps long periods longer.

        sync = offbeat.adacomm(model, optimizer, start=16, interval=500)
        sync.observe(loss)

    Wang & Joshi, "Adaptive Communication Strategies", SysML 2019, arXiv 1810.08313.
    Differs from the paper, whose intervals are seconds: here they are steps.
    """
    return synchronize(model, optimizer, AdaComm(start, interval, warmup), average(options), group, **options)
