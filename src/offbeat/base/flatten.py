"""Where parameters lie: one after the other in a few long vectors, a round needs no copies."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from offbeat.base.tensors import trainable


@torch.no_grad()
def flatten(model: nn.Module) -> nn.Module:
    """Lay the trainable parameters one after the other in memory, one vector per dtype and device.

    Plain blocking averages (`local_sgd`, `qsr`, `post_local_sgd`, … with `drift=False`) are then taken where
    the weights lie, without copying them out and back. The parameters stay the same objects: call it once the
    model is on its device, before or after building the optimizer. One caution: a worker lost in the middle
    of such a round leaves half-made sums in the weights of the others, so go on from a checkpoint.

        model = offbeat.flatten(build().to(device))
    """
    found = trainable(model)
    for name, p in found.items():
        if isinstance(p, DTensor) or not p.is_contiguous():
            fault = "sharded" if isinstance(p, DTensor) else "not contiguous"
            raise ValueError(
                f"flatten(model): {name!r} is {fault}; only whole contiguous parameters can move."
            )
    kinds = dict.fromkeys((p.dtype, p.device) for p in found.values())
    for kind in kinds:
        group = [p for p in found.values() if (p.dtype, p.device) == kind]
        flat = torch.cat([p.detach().flatten() for p in group])
        for p, part in zip(group, torch.split(flat, [p.numel() for p in group]), strict=True):
            p.data = part.view(p.shape)
    return model
