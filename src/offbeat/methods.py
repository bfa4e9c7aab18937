"""The named methods, simplest first: each is one expression over the parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec

from torch import nn
from torch.optim import Optimizer

from offbeat.agreement import compare_lines
from offbeat.errors import OffbeatError
from offbeat.exchange import Delay, Exchange
from offbeat.peers import Group, Subgroups, World, communicator
from offbeat.reduce import Reducer
from offbeat.riders import BufferRule, MomentRule
from offbeat.schedule import QSR, Every, Never, Schedule, Then, schedule
from offbeat.sync import Synchronizer
from offbeat.tensors import grads, params
from offbeat.update import Correct, Replace

__all__ = ["ddp", "hierarchical", "local_sgd", "post_local_sgd", "qsr"]

P = ParamSpec("P")
Optimizers = Optimizer | Sequence[Optimizer]


def recorded(function: Callable[P, Synchronizer]) -> Callable[P, Synchronizer]:
    """Record the call, as one would type it, for repr, checkpoints and the comparison of all workers."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def method(*args: P.args, **kwargs: P.kwargs) -> Synchronizer:
        try:
            call = _call(function.__name__, signature, args, kwargs)
            sync = function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _refuse(error, kwargs.get("group"))
            raise
        sync.agree(call)
        return sync

    return method


def _call(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> str:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}; it takes {', '.join(signature.parameters)}.") from None
    own = [
        f"{key}={value!r}"
        for key, value in given.items()
        if key not in ("model", "optimizer", "group") and value != signature.parameters[key].default
    ]
    return f"{name}({', '.join(own)})"


def _refuse(error: Exception, group: Any) -> None:
    """Where the others have no such error, they learn of it, since they wait for this worker."""
    with suppress(OffbeatError, TypeError, ValueError):
        compare_lines([f"the error {str(error)!r}"], communicator(group))


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
    reduce: Reducer | None = None,
    delay: Delay = 0,
    buffers: BufferRule = "average",
    moments: MomentRule = "keep",
    group: Group = None,
) -> Synchronizer:
    """Workers step alone; their parameters are averaged every so many steps.

        x ← mean(x)                        without delay
        x ← x + mean(sent) − sent          with delay: the steps made while the message flew are kept

    Larger `every` communicates less and lets the workers drift further apart.

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
                reduce=reduce,
                update=Correct() if delay else Replace(),
                delay=delay,
                buffers=buffers,
                moments=moments,
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
    reduce: Reducer | None = None,
    buffers: BufferRule = "average",
    moments: MomentRule = "keep",
    group: Group = None,
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
            Exchange(
                grads(model), when=Then(switch, Every(1), Never()), among=World(group), buffers="follow"
            ),
            Exchange(
                params(model),
                when=Then(switch, Never(), schedule(every)),
                among=World(group),
                reduce=reduce,
                buffers=buffers,
                moments=moments,
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
    buffers: BufferRule = "average",
    moments: MomentRule = "keep",
    group: Group = None,
) -> Synchronizer:
    """Parameters are averaged inside a node every `inner` steps, among all workers every `outer` steps.

    `nodes` is the number of ranks per node, or the ranks of each node. A step on both does only the global
    average.

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
                buffers=buffers,
                moments=moments,
            ),
            Exchange(params(model), when=Every(outer), among=World(group), buffers=buffers, moments=moments),
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
) -> Synchronizer:
    """Local SGD whose period grows as the learning rate decays.

        H = max(base, ⌊(alpha / lr)²⌋)

    Arguments are those of `QSR`; optimizer state stays local. `local_sgd(every=QSR(...))` takes the other
    options too.

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
            )
        ],
    )
