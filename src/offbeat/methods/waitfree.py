"""Methods that wait for nobody: rounds are held without those who are late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from offbeat.among import Butterfly, Group, World
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.averages import average
from offbeat.methods.call import Optimizers, Options, recorded
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
    """Parameters are averaged in groups after every step, waiting for nobody, and globally every so often.

        x ← sum/S                  S the group, other workers each time; the first to come calls all others
        x ← (sum + x)/(S + 1)      if this worker was late, and older weights of its are in the sum
        x ← mean(x)                after steps that are multiples of every

    It saves waiting, not bytes: a round follows every step. Larger `group_size` mixes the workers faster,
    larger `every` waits less and lets contributions get older. `grace` is how many seconds a round waits for
    a worker after the first has come, larger counts fewer late; None: until its step has taken longer than
    its steps usually do. `seed` draws the groups where the number of workers or the group's is no power of
    two.

    Of what a late worker did, the paper's rule, "join", keeps a part. With `late="add"` nothing is lost: the
    rounds held without it move the weights it last had, and its step is added to them, whole:

        c ← sum of all c in the group/S,    then    c ← c + (x − x₀)  and  x ← c,    x₀ where its step began

        sync = offbeat.wagma(model, optimizer, every=10)
        sync = offbeat.wagma(model, optimizer, every=10, late="add")

    Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group
    Averaging", IEEE TPDS 2021, arXiv 2005.00124.
    Differs from the paper: `grace`, `late="add"`, any number of workers, and after a global round a late
    worker contributes the mean all agreed on.
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
    """Gradients are averaged before every step, without waiting for the late, whose come a step later.

        g ← sum of all means since the last step      each gradient reaches each worker once
        x ← mean(x)                                    after steps that are multiples of every

    After multiples of `every` no gradient is missing anywhere. A round begins when the first worker comes
    ("solo"), or one drawn from `seed` ("majority"): the latter waits longer and has fewer late. `grace` as in
    `wagma`. Options are for the parameters.

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
