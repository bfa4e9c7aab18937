"""When sidecars go on: enough workers have answered with coded gradients, or a worker is overdue."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from offbeat.simulate import Compute
from offbeat.waitfree import CodedGradients
from offbeat.waitfree.base import REMEMBERED, allowance


def find_enough(part: CodedGradients, now: Tensor) -> Tensor:
    """Return when the answers decode, given the times of all: without the stragglers of each cluster."""
    if now.shape[-1] == 1:
        return now
    sizes = [len(ranks) for ranks in part.clusters.ranks]
    alike, spare = sizes.count(sizes[0]), part.clusters.stragglers
    cut = alike * sizes[0]  # the last cluster may be larger
    blocks = [now[..., :cut].reshape(*now.shape[:-1], alike, sizes[0])]
    blocks += [now[..., None, cut:]] if cut < now.shape[-1] else []
    ends = [block.sort(-1).values[..., -1 - spare].amax(-1, keepdim=True) for block in blocks]
    enough = torch.stack(ends).amax(0)
    return torch.minimum(now.amax(-1, keepdim=True), enough + (part.grace or 0.0))


@lru_cache
def find_allowances(compute: Compute, workers: int) -> Tensor:
    """Return how long a step of each worker may take before it is overdue."""
    times = compute.seconds(torch.arange(workers)[:, None], torch.arange(REMEMBERED)[None, :])
    return torch.tensor([allowance(row) for row in times.tolist()], dtype=torch.float64)
