"""Methods that rarely wait: rounds a period late, pulls, a gradient server, rounds without late workers."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Butterfly, Group, World
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.pull import PseudoSync
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods import parts
from offbeat.methods.parts import Optimizers, Options, average, record_call, synchronize
from offbeat.server import GLU, Compensated, LocalStep, PushPull
from offbeat.server.shard import OptimizerFactory
from offbeat.update.outer import SGD, Outer, Overlap
from offbeat.waitfree.parts import Activation, EagerGradients, GroupAverage, LateRule
from offbeat.when import Every, Schedule

__all__ = ["eager_sgd", "od_sgd", "overlap_local_sgd", "palsgd", "ssd_sgd", "wagma"]


@record_call
def overlap_local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 2,
    pull: float = 0.2,
    momentum: float = 0.6,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Workers are pulled toward an anchor z, which they agree on while they train.

        x ← (1 − pull)·x + pull·z        v ← momentum·v + (z − x)        send z − v: its mean is the next z

    A message has a whole period to arrive. Larger `pull` keeps the workers closer together, and undoes more
    of their last period; larger `momentum` remembers more rounds. The paper has pull=0.6, momentum=0.7.

        sync = offbeat.overlap_local_sgd(model, optimizer, every=2)

    Wang et al., "Overlap Local-SGD", ICASSP 2020, arXiv 2002.09539.
    """
    return synchronize(model, optimizer, every, Overlap(pull, momentum), group, delay="round", **options)


@record_call
def palsgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 64,
    p: float = 0.1,
    eta: float = 0.5,
    warmup: int = 0,
    lr: float = 0.7,
    momentum: float = 0.9,
    ramp: int = 40,
    seed: int = 0,
    shared: bool = True,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """DiLoCo whose workers are sometimes pulled toward the anchor. A pull needs no communication.

        x ← x − min(1, γ·eta/p)·(x − a)        with probability p after a gradient step, which uses γ/(1 − p)

    `every` counts pulls too. Larger `eta` pulls harder; larger `p` pulls more often and more gently. In the
    first `warmup` steps gradients are averaged and nothing is pulled. With shared=False each rank draws for
    itself, and a round follows every·(1 − p) gradient steps. `lr`, `momentum` and `ramp` are those of
    `diloco`; the paper's setting is ramp=0.

        sync = offbeat.palsgd(model, optimizer, every=64, p=0.1, eta=0.5)

    Naganuma et al., "Pseudo-Asynchronous Local SGD", 2025, arXiv 2504.18454.
    Differs from the released code, which pulls only the first tensor.
    """
    return Synchronizer(
        optimizer,
        [
            *parts.warm_up(model, warmup, group),
            outer := Exchange(
                params(model),
                when=parts.start_after(warmup, every if shared else _count_gradient_steps(every, p)),
                among=group,
                update=Outer(SGD(lr, momentum, nesterov=True, ramp=ramp)),
                **options,
            ),
            PseudoSync(outer, p=p, eta=eta, warmup=warmup, seed=seed, shared=shared),
        ],
    )


def _count_gradient_steps(every: int | Schedule, p: float) -> int:
    """Return how many gradient steps `every` iterations contain if a share p are pulls."""
    if not isinstance(every, int):
        raise TypeError(f"every={every!r} with shared=False: every must be a whole number of iterations.")
    return max(1, round(every * (1 - p))) if every > 0 else every


@record_call
def od_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    warmup: int = 200,
    lam: float = 0.0,
    server: OptimizerFactory | None = None,
    in_flight: int = 2,
    group: Group = None,
) -> Synchronizer:
    """Workers push gradients to a sharded server; its weights come back one step late.

        W ← server step with mean(g)                  in the order of the steps, during the next computation
        x ← W of the previous step − γ·(g + wd·W)     a local step fills the gap; with lam: g + lam·g²·(W − x)

    The first `warmup` steps are synchronous. Larger `lam` (0.04 in the paper) assumes a more curved loss.
    `PushPull` describes `server` and `in_flight`.

        sync = offbeat.od_sgd(model, optimizer, warmup=200)

    Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent", 2020, arXiv 2005.06728.
    """
    return Synchronizer(
        optimizer,
        [
            PushPull(
                params(model),
                every=1,
                warmup=warmup,
                local=Compensated(lam) if lam else LocalStep(),
                server=server,
                in_flight=in_flight,
                among=group,
            )
        ],
    )


@record_call
def ssd_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int = 5,
    warmup: int = 500,
    alpha: float = 2.0,
    beta: float = 0.5,
    local_lr: float | None = None,
    server: OptimizerFactory | None = None,
    in_flight: int = 2,
    group: Group = None,
) -> Synchronizer:
    """Workers push gradients to a sharded server every step and pull its weights every `every` steps.

        W ← server step with mean(g)                          every step, behind the computation
        b ← W                                                 one step after every `every`-th
        b ← b − γ (alpha·g + wd·b + beta·ĝ),    x ← b         every step; ĝ: the server's mean step

    The first `warmup` steps are synchronous. Larger `every` sends less and uses older weights. Larger `alpha`
    trusts the worker's own gradient more, larger `beta` follows the server further; alpha=1 with beta=0 takes
    plain local steps. `local_lr` replaces the optimizer's γ. The method is stable only while γ·every is
    small, and warns otherwise. `PushPull` describes `server` and `in_flight`.

        sync = offbeat.ssd_sgd(model, optimizer, every=5, warmup=500)

    Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training", 2020, arXiv
    2012.05396.
    Differs from the paper in scale: ĝ is divided by the server's learning rates, so its changes do no harm.
    """
    return Synchronizer(
        optimizer,
        [
            PushPull(
                params(model),
                every=every,
                warmup=warmup,
                local=GLU(alpha, beta, local_lr),
                server=server,
                in_flight=in_flight,
                among=group,
            )
        ],
    )


@record_call
def wagma(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    group_size: int | None = None,
    every: int = 10,
    grace: float | None = None,
    late: LateRule = "join",
    seed: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Averages parameters in groups after every step without waiting for late workers, and globally at times.

        x ← sum/S                  S workers, which change each time; the first to arrive calls all others
        x ← (sum + x)/(S + 1)      if this worker is late, and the sum contains its older weights
        x ← mean(x)                after steps that are multiples of every

    It saves waiting, not bytes. Larger `group_size` mixes the workers faster; larger `every` waits less and
    allows older contributions. A round waits `grace` seconds after the first worker arrives, or, with None,
    until a worker's step takes longer than usual. The paper's rule, "join", loses part of a late worker's
    progress. With "add", rounds move the weights c it last had, and its step from x₀ to x is added when done:

        c ← (sum of all c in the group)/S,    then    c ← c + (x − x₀)  and  x ← c

        sync = offbeat.wagma(model, optimizer, every=10)

    Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group
    Averaging", IEEE TPDS 2021, arXiv 2005.00124.
    Differs from the paper: `grace`, `late="add"`, any number of workers, and after a global round a late
    worker contributes the mean.
    """
    return Synchronizer(
        optimizer,
        [
            everywhere := Exchange(
                params(model), when=Every(every), among=group, update=average(options), **options
            ),
            GroupAverage(
                everywhere,
                among=Butterfly(group_size, group, seed),
                reduce=options.get("reduce"),
                grace=grace,
                late=late,
            ),
        ],
    )


@record_call
def eager_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int,
    activation: Activation = "solo",
    grace: float | None = None,
    seed: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Averages gradients before every step without waiting for late workers; late gradients arrive later.

        g ← sum of the means of all rounds since the last step      each gradient reaches each worker once
        x ← mean(x)                                                 after steps that are multiples of every

    A round starts when the first worker arrives ("solo"), or when a worker drawn from `seed` does
    ("majority"), which waits longer and makes fewer workers late. Larger `every` waits less and lets the
    workers drift further. `grace` is that of `wagma`. The options apply to the parameters.

        sync = offbeat.eager_sgd(model, optimizer, every=10, activation="majority")

    Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations",
    PPoPP 2020, arXiv 1908.04207.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(params(model), when=Every(every), among=group, update=average(options), **options),
            EagerGradients(
                grads(model), every=every, among=World(group), activation=activation, grace=grace, seed=seed
            ),
        ],
    )
