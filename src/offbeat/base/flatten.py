"""Parameters laid out in a few contiguous vectors, so that rounds need no copies."""

from __future__ import annotations

import torch
from torch import nn

from offbeat.base.tensors import is_sharded, trainable


@torch.no_grad()
def flatten(model: nn.Module) -> nn.Module:
    """Move the trainable parameters into contiguous memory, one vector per dtype and device.

    Blocking averages (`local_sgd`, `qsr`, `post_local_sgd`, … with `drift=False`) then work on the weights in
    place, without copies. The parameters stay the same objects. Call it when the model is on its device,
    before or after building the optimizer. If a worker is lost during such a round, the weights of the others
    hold partial sums: continue from a checkpoint.

        model = offbeat.flatten(build().to(device))
    """
    parameters = trainable(model)
    for name, p in parameters.items():
        if is_sharded(p) or not p.is_contiguous():
            fault = "sharded" if is_sharded(p) else "not contiguous"
            raise ValueError(
                f"flatten(model): {name!r} is {fault}; only whole, contiguous parameters can be moved."
            )
    kinds = dict.fromkeys((p.dtype, p.device) for p in parameters.values())
    for kind in kinds:
        group = [p for p in parameters.values() if (p.dtype, p.device) == kind]
        flat = torch.cat([p.detach().flatten() for p in group])
        for p, part in zip(group, torch.split(flat, [p.numel() for p in group]), strict=True):
            p.data = part.view(p.shape)
    return model
