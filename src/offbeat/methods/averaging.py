"""Methods that average, simplest first: each is one expression over the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from offbeat.among import Group, Subgroups, World
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.rhythm import Delay
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.averages import average, correct, exact
from offbeat.methods.call import Optimizers, Options, recorded
from offbeat.methods.warmup import after, synchronous
from offbeat.reduce import Reducer
from offbeat.update.update import Update
from offbeat.when import QSR, AdaComm, Adaptive, Every, Schedule, schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "adacomm",
    "adaptive",
    "cocod",
    "dasgd",
    "ddp",
    "hierarchical",
    "local_sgd",
    "post_local_sgd",
    "qsr",
]


@recorded
def ddp(
    model: nn.Module, optimizer: Optimizers, *, reduce: Reducer | None = None, group: Group = None
) -> Synchronizer:
    """Gradients are averaged before every step; buffers follow rank 0. The synchronous baseline.

        g ← mean(g)

    The average starts when the backward pass has ended: nothing is hidden behind it.

        sync = offbeat.ddp(model, optimizer)
    """
    return Synchronizer(
        optimizer,
        [Exchange(grads(model), when=Every(1), among=World(group), reduce=reduce, buffers="follow")],
    )


@recorded
def local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 8,
    delay: Delay = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Workers step alone; their parameters are averaged every so many steps.

        x ← mean(x)                        without delay
        x ← x + mean(sent) − sent          with delay: the steps made while the message flew are kept

    Larger `every` communicates less and lets the workers drift further apart. With a `reduce` that loses
    something, ways from an anchor are sent, which takes one more copy of the model.

        sync = offbeat.local_sgd(model, optimizer, every=8)

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=schedule(every),
                among=World(group),
                update=correct(options) if delay else average(options),
                delay=delay,
                **options,
            )
        ],
    )


@recorded
def post_local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    switch: int,
    every: int | Schedule = 8,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Gradients are averaged in the first `switch` steps, parameters every so many steps after them.

    The early, fast-changing phase of training stays synchronous. The first average of parameters comes
    `every` steps after the switch.

        sync = offbeat.post_local_sgd(model, optimizer, switch=1000, every=8)

    Lin et al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020, arXiv 1808.07217.
    """
    return Synchronizer(
        optimizer,
        [
            *synchronous(model, switch, group),
            Exchange(
                params(model),
                when=after(switch, schedule(every)),
                among=World(group),
                update=average(options),
                **options,
            ),
        ],
    )


@recorded
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
    """Parameters are averaged inside a node every `inner` steps, among all workers every `outer` steps.

    `nodes` is the number of ranks per node, or the ranks of each node. A step on both does only the global
    average. `update` is what the global round does instead of averaging, such as an `Outer` step. A `reduce`
    that loses something is for the global rounds; inside a node the mean stays exact.

        sync = offbeat.hierarchical(model, optimizer, nodes=8, inner=1, outer=16)

    Lin et al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020, arXiv 1808.07217.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=Every(inner, skip=outer),
                among=Subgroups(nodes, group),
                **exact(options),
            ),
            Exchange(
                params(model),
                when=Every(outer),
                among=World(group),
                update=update or average(options),
                **options,
            ),
        ],
    )


@recorded
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

        H = max(base, ⌊(alpha / lr)²⌋)

    Arguments are those of `QSR`.

        sync = offbeat.qsr(model, optimizer, alpha=0.0175, base=4, warmup=10_000, peak=0.008)

    Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024, arXiv 2310.14423.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=QSR(alpha=alpha, base=base, warmup=warmup, peak=peak, total=total),
                among=World(group),
                update=average(options),
                **options,
            )
        ],
    )


@recorded
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

    Arguments are those of `Adaptive`: the drift is sampled until step `sample`, about a quarter of the run.

        sync = offbeat.adaptive(model, optimizer, start=4, sample=1000)

    Jiang & Agrawal, "Adaptive Periodic Averaging", 2020, arXiv 2007.06134.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=Adaptive(start=start, sample=sample, warmup=warmup),
                among=World(group),
                update=average(options),
                **options,
            )
        ],
    )


@recorded
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
    """Local SGD whose period shrinks as the loss falls. Arguments are those of `AdaComm`.

    The loop hands the loss over:

        sync = offbeat.adacomm(model, optimizer, start=16, interval=500)
        sync.observe(loss)

    Wang & Joshi, "Adaptive Communication Strategies", SysML 2019, arXiv 1810.08313.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model),
                when=AdaComm(start=start, interval=interval, warmup=warmup),
                among=World(group),
                update=average(options),
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
    """Local SGD whose average lands `delay` steps late, blended with what the worker did since.

        x ← keep·x + (1 − keep)·mean(sent)

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
    """Local SGD whose average lands `delay` steps late and keeps all that the worker did since.

        x ← x + mean(sent) − sent

        sync = offbeat.cocod(model, optimizer, every=8, delay=4)

    Shen et al., "Faster Distributed Deep Net Training: Computation and Communication Decoupled SGD",
    IJCAI 2019, arXiv 1906.12043.
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
