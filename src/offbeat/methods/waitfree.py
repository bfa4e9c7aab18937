"""Wait-free methods: their rounds do not wait for late workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from offbeat.among import Butterfly, Group, World
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Optimizers, Options, recorded
from offbeat.methods.parts import average
from offbeat.waitfree import EagerGradients, GroupAverage
from offbeat.waitfree.eager import Activation
from offbeat.waitfree.group_average import Late
from offbeat.when import Every

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["eager_sgd", "wagma"]


@recorded
def wagma(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    group_size: int | None = None,
    every: int = 10,
    grace: float | None = None,
    late: Late = "join",
    seed: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Averages parameters in groups after every step without waiting for late workers, and globally at times.

        x ← sum/S                  S workers, which change each time; the first to arrive calls all others
        x ← (sum + x)/(S + 1)      if this worker is late, and the sum contains its older weights
        x ← mean(x)                after steps that are multiples of every

    It saves waiting, not bytes: a round follows every step. Larger `group_size` mixes the workers faster.
    Larger `every` waits less and allows older contributions. `grace` is how many seconds a round waits for a
    worker after the first has arrived; larger values make fewer workers late. None waits until the worker's
    step takes longer than usual. `seed` draws the groups if a size is not a power of two.

    With the paper's rule, "join", part of a late worker's progress is lost. With `late="add"` nothing is:
    rounds move the weights c that the worker last had, and a step from x₀ to x is added to them when it is
    done:

        c ← (sum of all c in the group)/S,    then    c ← c + (x − x₀)  and  x ← c

        sync = offbeat.wagma(model, optimizer, every=10)
        sync = offbeat.wagma(model, optimizer, every=10, late="add")

    Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group
    Averaging", IEEE TPDS 2021, arXiv 2005.00124.
    Differs from the paper: `grace`, `late="add"`, any number of workers, and after a global round a late
    worker contributes the mean.
    """
    return Synchronizer(
        optimizer,
        [
            exchange := Exchange(
                params(model), when=Every(every), among=World(group), update=average(options), **options
            ),
            GroupAverage(
                exchange,
                among=Butterfly(group_size, group, seed),
                reduce=options.get("reduce"),
                grace=grace,
                late=late,
            ),
        ],
    )


@recorded
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
            Exchange(
                params(model), when=Every(every), among=World(group), update=average(options), **options
            ),
            EagerGradients(
                grads(model),
                every=every,
                among=World(group),
                activation=activation,
                grace=grace,
                seed=seed,
            ),
        ],
    )
