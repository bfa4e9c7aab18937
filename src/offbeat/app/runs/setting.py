"""The setting of one run: everything that decides its outcome, as plain values."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.base.checks import check_number, check_whole
from offbeat.base.errors import BadArgument
from offbeat.base.units import Straggler, parse_link, parse_straggler
from offbeat.engine.transfer import why_unshared
from offbeat.methods.expression import method
from offbeat.simulate import simulate
from offbeat.tasks import Task, find_task
from offbeat.tasks.task import adamw, heavy_ball

OPTIMIZERS = {"adamw": adamw, "sgd": heavy_ball}
TORCH_DDP = "torch_ddp()"
MOST = {
    "workers": 10_000, "steps": 10**9, "batch": 10**6, "evaluations": 10**9, "checkpoint_every": 10**9
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of one run. None for `batch`, `lr` and `optimizer` means the task's default."""

    method: str
    task: str = "digits"
    model: str | None = None
    data: str | None = None
    workers: int = 4
    steps: int = 400
    batch: int | None = None
    lr: float | None = None
    optimizer: str | None = None
    seed: int = 0
    evaluations: int = 10
    checkpoint_every: int | None = None
    link: str | None = None
    straggler: tuple[str, ...] = ()
    where: Literal["processes", "netns", "simulation"] = "processes"
    compute: float = 0.02  # virtual seconds per step, in simulation

    def find_task(self, cache: Path | None = None) -> Task:
        """Load the task, which may take a while. Raises before that if another value is wrong by itself."""
        check_values(self)
        return find_task(self.task, size=self.model, data=self.data, seed=self.seed, cache=cache)

    def fill(self, task: Task) -> "Setting":
        """The setting with the task's defaults filled in and the method written as a call."""
        call = self.method.strip() + ("" if "(" in self.method else "()")
        lr = task.lr if self.lr is None else self.lr
        return replace(self, method=call, batch=self.batch or task.batch_size, lr=lr)

    def optimizer_of(self, task: Task, model: nn.Module) -> Optimizer:
        assert self.lr is not None
        make = task.optimizer if self.optimizer is None else OPTIMIZERS[self.optimizer]
        return make(model.parameters(), self.lr)

    def rate(self, step: int) -> float:
        """The factor on the learning rate: a linear warm-up, then a cosine down to a tenth."""
        warmup = max(1, min(40, self.steps // 10))
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, self.steps - warmup)))

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after this step. The last step is always evaluated."""
        return 0 < step < self.steps and step % max(1, round(self.steps / self.evaluations)) == 0

    @cached_property
    def load(self) -> int:
        """The batches that a worker computes in each step."""
        if self.method == TORCH_DDP or self.workers == 1:
            return 1
        call = method(self.method)
        return 1 + int(call.arguments.get("stragglers", 1)) if call.name == "gradient_code" else 1

    @cached_property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Parsed once, since every step of every rank asks."""
        return tuple(parse_straggler(text, workers=self.workers) for text in self.straggler)

    def late(self, rank: int, step: int) -> float:
        """The extra seconds of a rank in a step."""
        return sum(straggler.seconds(rank, step) for straggler in self.stragglers)


def check_values(setting: Setting) -> None:
    """Raise if a value is wrong, whatever the task."""
    for name, most in MOST.items():
        if (value := getattr(setting, name)) is not None:
            check_whole(name, value, 1, most)
    if abs(setting.seed) >= 2**63:
        raise BadArgument("seed", setting.seed, "seed must be below 2**63 in size.")
    if setting.lr is not None:
        check_number("lr", setting.lr, 1e6)
    if setting.optimizer is not None and setting.optimizer not in OPTIMIZERS:
        raise BadArgument("optimizer", setting.optimizer, f"name one of {', '.join(OPTIMIZERS)}.")
    if setting.link is not None and parse_link(setting.link).latency and setting.where == "netns":
        raise BadArgument(
            "link", setting.link, "a link has no latency with --netns; without it, both are emulated."
        )
    _ = setting.stragglers  # parses them
    if setting.method.strip().removesuffix("()") != TORCH_DDP.removesuffix("()"):
        method(setting.method)


def check(setting: Setting, task: Task) -> Setting:
    """The setting with the task's defaults filled in. Raises if the run cannot be made; starts nothing."""
    check_values(setting)
    full = setting.fill(task)
    assert full.batch is not None
    for rank in range(setting.workers):
        task.batches(rank, setting.workers, full.batch, setting.seed)
    _check_method(full, task)
    return full


def _check_method(setting: Setting, task: Task) -> None:
    """Build the method once for every worker, in simulation."""
    if setting.method == TORCH_DDP:
        if setting.where == "simulation":
            raise ValueError("torch_ddp cannot be simulated: leave it out, or use ddp.")
        return
    why_unshared_in(setting, task)


def why_unshared_in(setting: Setting, task: Task) -> str | None:
    """Build the method once for every worker, in simulation: why can no other number of workers go on?"""
    if setting.method == TORCH_DDP:
        return None
    build = method(setting.method)

    def worker(comm: Any) -> str | None:
        model = task.model()
        return why_unshared(build(model, setting.optimizer_of(task, model), group=comm).parts)

    state = torch.get_rng_state()
    try:
        return simulate(worker, setting.workers)[0]
    except NotImplementedError:
        return None  # cannot be simulated: real workers will report any error
    finally:
        torch.set_rng_state(state)
