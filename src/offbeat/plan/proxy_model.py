"""A small model in place of the real one."""

from __future__ import annotations

import math

import torch
from torch import nn

from offbeat.plan.job import Job

WIDTHS = (64, 128, 192)  # bytes are quadratic in the width, so three widths give any other


class ProxyModel(nn.Module):
    """Equal square layers in the dtype of the job. Every weight has a gradient."""

    def __init__(self, job: Job, width: int) -> None:
        super().__init__()
        weights = [
            nn.Parameter(torch.full((width, width), 0.5, dtype=job.torch_dtype)) for _ in range(job.layers)
        ]
        self.layers = nn.ModuleList(nn.ParameterList([weight]) for weight in weights)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.25)


def real_width(job: Job) -> float:
    """The width at which the proxy model has as many parameters as the job."""
    return math.sqrt(job.parameters / job.layers)


def local_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    rate = job.rate(0) or 1e-3
    if job.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if job.optimizer == "momentum" else 0.0)
