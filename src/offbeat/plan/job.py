"""The job and the cluster of a plan, and a small proxy for the model."""

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from offbeat.base.bare import SGD, AdamW
from offbeat.base.checks import is_whole
from offbeat.base.errors import BadArgument
from offbeat.simulate import Compute, Failures, Network

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Optimizer = Literal["sgd", "momentum", "adamw"]
MOST = {"workers": 10**6, "steps": 10**6, "parameters": 10**15, "layers": 1000}
T = TypeVar("T")


@dataclass(frozen=True)
class Cosine:
    """A rate that rises linearly from `floor` to `peak` over `warmup` steps, then falls as a cosine."""

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.floor < self.peak < math.inf:
            raise ValueError(f"{self!r}: peak must be a positive number above floor.")
        if not 0 <= self.warmup < self.steps:
            raise BadArgument("warmup", self.warmup, "warmup must be shorter than steps.", call=self)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.floor + step * (self.peak - self.floor) / self.warmup
        turn = math.pi * (step - self.warmup) / (self.steps - self.warmup)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(turn)) / 2


@dataclass(frozen=True)
class Flat:
    """A constant rate."""

    rate: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError(f"{self!r}: the rate must be a finite number, 0 or more.")

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class Job:
    """A run: the steps of each worker, and the trainable parameters.

    `rate` gives the learning rate of each step, for schedules that depend on it. `optimizer` is the local
    one; some methods send its moments. The plan assumes a model of `layers` equal layers. `backward` is the
    share of a step that the backward pass takes, during which `ddp` sends gradients; 0 sends them after it.
    """

    steps: int
    parameters: int
    dtype: Dtype = "float32"
    rate: Callable[[int], float] = Flat(1e-3)
    optimizer: Optimizer = "adamw"
    layers: int = 12
    backward: float = 2 / 3

    def __post_init__(self) -> None:
        _check_counts(self, "steps", "parameters", "layers")
        if not (isinstance(self.backward, int | float) and 0 <= self.backward <= 1):
            raise BadArgument("backward", self.backward, "backward must be from 0 to 1.", call="Job")
        for name, kind in (("dtype", Dtype), ("optimizer", Optimizer)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise BadArgument(name, getattr(self, name), f"choose one of {known}.", call="Job")


@dataclass(frozen=True)
class Cluster:
    """The machines: how many workers, how long a step takes them, their links, and how often they fail.

    Cluster(64, Jittered(0.25, jitter=0.05), Network(latency=0.001, bandwidth=1.25e9, reduce="ring"))
    """

    workers: int
    compute: Compute
    network: Network = field(default_factory=Network)
    failures: Failures = field(default_factory=lambda: Failures(0.0))

    def __post_init__(self) -> None:
        _check_counts(self, "workers")
        if not isinstance(self.compute, Compute):
            raise TypeError(f"Cluster(compute={self.compute!r}): give a value such as Constant(0.2).")
        self.network.check(self.workers)


def _check_counts(value: Job | Cluster, *names: str) -> None:
    for name in names:
        count = getattr(value, name)
        if not is_whole(count, 1) or count > MOST[name]:
            reason = f"{name} must be a whole number from 1 to {MOST[name]}."
            raise BadArgument(name, count, reason, call=type(value).__name__)


def read(path: str | PathLike[str], kind: type[T]) -> T | None:
    """The first value of this kind that a small Python file defines, such as `cluster = Cluster(...)`."""
    try:
        found = runpy.run_path(str(path))
    except Exception as error:  # the file is the user's, and may raise anything
        reason = f"this file cannot be read ({type(error).__name__}: {error})."
        raise BadArgument("path", str(path), reason, call="read") from error
    return next((value for value in found.values() if isinstance(value, kind)), None)


class ProxyModel(nn.Module):
    """Equal square layers in the dtype of the job. Every weight has a gradient."""

    def __init__(self, job: Job, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(job.layers):
            weight = nn.Parameter(torch.full((width, width), 0.5, dtype=getattr(torch, job.dtype)))
            weight.grad = torch.full_like(weight, 0.25)
            self.layers.append(nn.ParameterList([weight]))


def local_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    rate = job.rate(0) or 1e-3
    if job.optimizer == "adamw":
        return AdamW(model.parameters(), lr=rate)
    return SGD(model.parameters(), lr=rate, momentum=0.9 if job.optimizer == "momentum" else 0.0)
