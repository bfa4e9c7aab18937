"""Gradient coding: extra computation instead of waiting for late workers."""

from __future__ import annotations

from torch import nn

from offbeat.among import Group, World
from offbeat.base.tensors import grads
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.parts import Optimizers, record_call
from offbeat.waitfree.coded import CodedGradients

__all__ = ["gradient_code"]


@record_call
def gradient_code(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    stragglers: int = 1,
    clusters: int | None = None,
    dynamic: bool = False,
    grace: float = 0.0,
    behind: int = 16,
    group: Group = None,
) -> Synchronizer:
    """Every worker computes `stragglers` + 1 parts of each batch, so the others' answers give the exact mean.

        cᵢ = Σⱼ Bᵢⱼ gⱼ        worker i sends one vector for its stragglers + 1 of K parts
        g ← (Σ aᵢ cᵢ)/K       over the workers that have answered, a with Σᵢ aᵢ Bᵢⱼ = 1: the mean of all gⱼ

    No round waits for up to `stragglers` late workers in each cluster. A late answer is dropped. Its worker
    applies the results of the rounds it has missed, in order, and goes on where the others are. Larger
    `stragglers` waits less and computes more. By default clusters have stragglers + 1 workers, which all
    compute the same parts; the last one also has the rest. `clusters` is another number of equal clusters;
    larger ones have a cyclic code. With `dynamic`, clusters are formed again after each round, to spread
    workers that stay late evenly. Larger `grace` waits longer, in seconds, for workers that are a little
    late. Larger `behind` lets a worker be more rounds behind before the others wait; each of these rounds
    needs one copy of the gradients. `offbeat.coded_sampler` hands out the parts:

        sync = offbeat.gradient_code(model, optimizer, stragglers=1)
        for parts in offbeat.coded_sampler(dataset, sync, batch_size=32):
            for part in parts:
                x, y = part.load()
                (part.weight * loss(model(x), y)).backward()
            sync.step()
            optimizer.zero_grad()

    Tandon et al., "Gradient Coding", ICML 2017, arXiv 1612.03301. Clusters: Buyukates et al., "Gradient
    Coding with Dynamic Clustering", 2021, arXiv 2103.01206.
    Differs from the papers: there is no server, clusters are as small as possible by default, and every
    worker can read all parts.
    """
    return Synchronizer(
        optimizer,
        [
            CodedGradients(
                grads(model),
                stragglers=stragglers,
                clusters=clusters,
                dynamic=dynamic,
                grace=grace,
                behind=behind,
                among=World(group),
            )
        ],
    )
