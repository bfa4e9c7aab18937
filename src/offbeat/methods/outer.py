"""Methods with an anchor, the weights from which the workers start a period, and outer steps."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Group, Pairs, Subgroups
from offbeat.base.tensors import grads, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods import parts
from offbeat.methods.parts import Extras, Optimizers, Options, record_call, synchronize
from offbeat.reduce import Quantized, Reducer
from offbeat.update.outer import SGD, Eager, Gossip, Outer, SlowMo
from offbeat.when import Every, Schedule, schedule

__all__ = ["diloco", "eager_diloco", "lookahead_diloco", "noloco", "slowmo", "snoo", "streaming_diloco"]

_FOUR_BITS = Quantized(4)


@record_call
def slowmo(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 12,
    lr: float = 1.0,
    momentum: float = 0.7,
    ramp: int = 40,
    warmup: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD with momentum over rounds.

        v ← momentum·r·v + (a − mean(x))        a ← a − lr·v        x ← a

    r is the ratio of the learning rates of this round and the previous one. Larger `momentum` (0.4 to 0.8)
    remembers more rounds; larger `lr` moves further along v. The momentum grows over the rounds, more slowly
    with a larger `ramp`: see `SGD`. The paper uses ramp=0, and with SGD moments="reset".

        sync = offbeat.slowmo(model, optimizer, every=12, momentum=0.7)

    Wang et al., "SlowMo", ICLR 2020, arXiv 1910.00643.
    Differs from the paper in the ramp, and in form: v is the paper's momentum times the learning rate.
    """
    return synchronize(model, optimizer, every, SlowMo(lr, momentum, ramp), group, warmup=warmup, **options)


@record_call
def diloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 64,
    lr: float = 0.7,
    momentum: float = 0.9,
    ramp: int = 40,
    warmup: int = 0,
    clip: float | None = None,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Workers step alone for a long period; an outer Nesterov SGD then follows their mean displacement.

        Δ = mean(a − x)        a ← outer.step(a, grad=Δ)        x ← a

    Larger `lr` takes longer outer steps: try 0.4 to 0.6 with two workers, closer to 1 with eight. Larger
    `momentum` remembers more rounds. It grows over the rounds, more slowly with a larger `ramp`: see `SGD`.
    The paper's setting is ramp=0, for runs of hundreds of rounds that do not start from scratch. The first
    `warmup` steps average gradients. With `clip`, a worker sends a displacement of at most this length. For
    another outer optimizer use `update=Outer(...)`.

        sync = offbeat.diloco(model, optimizer, every=64)

    Douillard et al., "DiLoCo", 2023, arXiv 2311.08105.
    """
    return synchronize(
        model,
        optimizer,
        every,
        Outer(SGD(lr, momentum, nesterov=True, ramp=ramp), clip=clip),
        group,
        warmup=warmup,
        **options,
    )


@record_call
def snoo(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 20,
    lr: float = 0.7,
    momentum: float = 0.5,
    ramp: int = 40,
    reduce: Reducer | None = None,
    group: Group = None,
) -> Synchronizer:
    """The outer step of DiLoCo without its communication: for one worker, or on top of `ddp`.

        g ← mean(g) every step        a ← outer.step(a, grad=a − x)        x ← a every `every` steps

    Workers stay equal, so each makes the outer step for itself. Larger `momentum` remembers more periods, and
    larger `lr` moves further; `ramp` is that of `diloco`. With momentum=0 it is Lookahead. The paper's
    momentum is constant: ramp=0. `reduce` applies to the gradients.

        sync = offbeat.snoo(model, optimizer, every=20)

    Kallusky et al., "SNOO: Step-K Nesterov Outer Optimizer", 2025, arXiv 2510.15830.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(grads(model), when=Every(1), among=group, reduce=reduce, buffers="follow"),
            Exchange(
                params(model),
                when=schedule(every),
                among=Subgroups(1, group),
                update=Outer(SGD(lr, momentum, nesterov=True, ramp=ramp)),
                buffers="keep",
                drift=False,
            ),
        ],
    )


@record_call
def lookahead_diloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 64,
    inner: int = 8,
    alpha: float = 0.5,
    lr: float = 0.7,
    momentum: float = 0.9,
    ramp: int = 40,
    warmup: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """DiLoCo whose local optimizer is wrapped in Lookahead, which costs no communication.

        φ ← φ + alpha·(x − φ)        x ← φ        every `inner` steps, on each worker alone
        a ← outer.step(a, grad=mean(a − x))        x, φ ← a        every `every` steps

    A smaller `alpha` damps the local steps more; alpha=1 is `diloco`. Where both fall on the same step, the
    slow weights φ step first. `lr`, `momentum`, `ramp` and `warmup` are those of `diloco`.

        sync = offbeat.lookahead_diloco(model, optimizer, every=64, inner=8)

    Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", NeurIPS 2019, arXiv 1907.08610, inside
    Douillard et al., "DiLoCo", 2023, arXiv 2311.08105.
    """
    return Synchronizer(
        optimizer,
        [
            *parts.warm_up(model, warmup, group),
            Exchange(
                params(model),
                when=parts.start_after(warmup, Every(inner)),
                among=Subgroups(1, group),
                update=parts.slow_weights(alpha),
                buffers="keep",
                drift=False,
            ),
            Exchange(
                params(model),
                when=parts.start_after(warmup, every),
                among=group,
                update=Outer(SGD(lr, momentum, nesterov=True, ramp=ramp)),
                **options,
            ),
        ],
    )


@record_call
def streaming_diloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int = 64,
    fragments: int = 4,
    delay: int = 1,
    keep: float = 0.5,
    lr: float = 0.7,
    momentum: float = 0.9,
    ramp: int = 40,
    reduce: Reducer | None = _FOUR_BITS,
    group: Group = None,
    **extras: Unpack[Extras],
) -> Synchronizer:
    """DiLoCo in fragments of whole layers that take turns; each lands `delay` steps after it was sent.

        a_p ← outer.step(a_p, grad=mean(a_p − x_p))        x_p ← keep·x_p + (1 − keep)·a_p

    More `fragments` make smaller messages; larger `delay` hides longer ones. Larger `keep` keeps more of the
    steps made during the delay; without a delay nothing is kept. Buffers travel with the first fragment.
    `lr`, `momentum` and `ramp` are those of `diloco`; the paper's setting is ramp=0.

        sync = offbeat.streaming_diloco(model, optimizer, every=64, fragments=4)

    Douillard et al., "Streaming DiLoCo", 2025, arXiv 2501.18512.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(
                params(model, only=names),
                when=parts.take_turn(every, i, fragments),
                among=group,
                update=Outer(SGD(lr, momentum, nesterov=True, ramp=ramp), keep=keep if delay else 0.0),
                reduce=reduce,
                delay=delay,
                **(extras if i == 0 else {**extras, "buffers": "keep"}),
            )
            for i, names in enumerate(parts.cut_into_fragments(model, fragments))
        ],
    )


@record_call
def eager_diloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 64,
    lr: float = 0.7,
    momentum: float = 0.9,
    ramp: int = 40,
    share: float = 0.75,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """DiLoCo that rarely waits: a worker uses its own displacement at once and the others' one round later.

        Δ_k(r) = a_k − x_k        D_k = Δ̄(r−1) + max(share, 1/K)·(Δ_k(r) − Δ_k(r−1))
        a_k ← outer.step(a_k, grad=D_k)        x_k ← a_k

    A message has a whole period to arrive. Workers differ until `finish()`. `share` is the part of its newest
    displacement that a worker uses at once, at least 1/K. With share=1 the mean of the workers makes the
    outer steps of `diloco`, but the workers differ most and may drift apart; the smaller it is, the more the
    mean lags behind. `lr`, `momentum` and `ramp` are those of `diloco`. The paper has share=0, ramp=0.

        sync = offbeat.eager_diloco(model, optimizer, every=64)

    Kale et al., "Eager Updates for Overlapped Communication and Computation in DiLoCo", 2025, arXiv
    2502.12996. Differs from the paper in `share`, in the ramp, and at the end.
    """
    return synchronize(
        model,
        optimizer,
        every,
        Eager(SGD(lr, momentum, nesterov=True, ramp=ramp), share),
        group,
        delay="round",
        **options,
    )


@record_call
def noloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 50,
    lr: float = 0.7,
    momentum: float = 0.5,
    ramp: int = 40,
    seed: int = 0,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """DiLoCo among random pairs that change every round: no worker ever waits for all others.

        m ← momentum·m + lr·(mean_pair(x) − φ)        φ ← φ + m        x ← φ

    Each worker has its own anchor φ. With an odd number of workers, one stays alone in each round. Larger
    `lr` moves further toward the pair's mean; larger `momentum` remembers more rounds. `ramp` is that of
    `diloco`; the paper's setting is ramp=0.

        sync = offbeat.noloco(model, optimizer, every=50)

    Kolehmainen et al., "NoLoCo", 2025, arXiv 2506.10911.
    Differs from the paper in the ramp, and in form: mean(Δ) + mean(φ) is mean(x), so half the bytes suffice.
    """
    return synchronize(
        model, optimizer, every, Gossip(SGD(lr, momentum, ramp=ramp)), Pairs(group, seed), **options
    )
