"""Methods with a server: gradients are pushed every step, weights pulled now and then."""

from __future__ import annotations

from torch import nn

from offbeat.among import Group, World
from offbeat.base.tensors import params
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Optimizers, recorded
from offbeat.server import GLU, Compensated, LocalStep, PushPull
from offbeat.server.shard import Factory

__all__ = ["od_sgd", "ssd_sgd"]


@recorded
def od_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    warmup: int = 200,
    lam: float = 0.0,
    server: Factory | None = None,
    in_flight: int = 2,
    group: Group = None,
) -> Synchronizer:
    """Gradients go to a sharded server, whose weights are one step late: a local step fills the gap.

        W ← server step with mean(g)        x ← W of the step before − γ·g        nobody waits for the mean

    The first `warmup` steps are synchronous. With `lam` above 0 (the paper takes 0.04) the gradient is
    carried over to the weights it is applied to: g + lam·g²·(W − x). Larger takes the loss for more curved.
    `server` and `in_flight` are those of `PushPull`.

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
                among=World(group),
            )
        ],
    )


@recorded
def ssd_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int = 5,
    warmup: int = 500,
    alpha: float = 2.0,
    beta: float = 0.5,
    local_lr: float | None = None,
    server: Factory | None = None,
    in_flight: int = 2,
    group: Group = None,
) -> Synchronizer:
    """Gradients go to a sharded server every step; its weights come back every few, and are extrapolated.

        W ← server step with mean(g)                             every step, behind the computation
        b ← W                                                    one step after every `every`-th
        b ← b − γ (alpha·g + wd·b + beta·ĝ),    x ← b            every step; ĝ: the server's mean step

    The first `warmup` steps are synchronous. Larger `every` sends less and works with older weights, larger
    `alpha` trusts the worker's own gradient more, larger `beta` follows the server further; alpha=1 and
    beta=0 are plain local steps. `local_lr` stands for γ, which is the optimizer's unless it is given. Stable
    only while γ·every is small: a warning says when it is not. `server` and `in_flight` are those of
    `PushPull`.

        sync = offbeat.ssd_sgd(model, optimizer, every=5, warmup=500)

    Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training", 2020,
    arXiv 2012.05396.
    Differs from the paper in scale: ĝ is divided by the server's rates, so that a changing rate does no harm.
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
                among=World(group),
            )
        ],
    )
