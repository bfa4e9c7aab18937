"""Methods with a server: workers push gradients every step and pull weights every few steps."""

from __future__ import annotations

from torch import nn

from offbeat.among import Group, World
from offbeat.base.tensors import params
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Optimizers, recorded
from offbeat.server import GLU, Compensated, LocalStep, PushPull
from offbeat.server.shard import OptimizerFactory

__all__ = ["od_sgd", "ssd_sgd"]


@recorded
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

    The first `warmup` steps are synchronous. Above 0, `lam` corrects the gradient for the weights it is
    applied to (0.04 in the paper); larger values assume a more strongly curved loss. `PushPull` describes
    `server` and `in_flight`.

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
                among=World(group),
            )
        ],
    )
