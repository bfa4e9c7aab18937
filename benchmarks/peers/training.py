"""The run that all contenders make: a byte GPT of 1.85 M parameters, AdamW, warm-up and cosine, clipping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from contenders import STEPS, Contender, Training, build, offbeat_method
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import offbeat
from offbeat.tasks import Task, bytes_task

WORKERS, BATCH, SHOWN = 4, 8, 20  # the weights are kept every 20 steps, where most rounds end


@dataclass(frozen=True)
class Setting:
    """What the contenders have in common."""

    size: str = "medium"
    data: str | None = None
    steps: int = STEPS
    lr: float = 3e-3
    seed: int = 0

    def task(self) -> Task:
        return bytes_task(self.size, data=self.data, seed=self.seed)

    def rate(self, step: int, warmup: int = 40) -> float:
        """A linear warm-up, then a cosine down to a tenth: the schedule of benchmarks/quality."""
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))


@dataclass
class Worker:
    """One worker's training. Copies of the weights are kept, with the time, and evaluated after the run."""

    setting: Setting
    rank: int
    start: Callable[[nn.Module, torch.optim.Optimizer], Training]
    kept: list[tuple[int, float, Tensor]] = field(default_factory=list)  # step, seconds, weights

    def __post_init__(self) -> None:
        torch.manual_seed(self.setting.seed)
        self.task = self.setting.task()
        self.model = self.task.model()
        self.optimizer = self.task.optimizer(self.model.parameters(), self.setting.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.setting.rate)
        self.batches = self.task.batches(self.rank, WORKERS, BATCH, self.setting.seed)

    def begin(self) -> None:
        """Starts the clock and then the contender, since some send the first weights now, some in step 1."""
        self.began = time.perf_counter()
        self.training = self.start(self.model, self.optimizer)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.task.loss(self.training.module, next(self.batches)).backward()
            self.training.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def whole_run(self) -> None:
        self.begin()
        for step in range(0, self.setting.steps, SHOWN):
            count = min(SHOWN, self.setting.steps - step)
            self.steps(count)
            if step + count < self.setting.steps:
                self._keep(step + count)
        self.training.finish()
        self._keep(self.setting.steps)

    def _keep(self, step: int) -> None:
        weights = parameters_to_vector(self.model.parameters()).detach().clone()
        self.kept.append((step, time.perf_counter() - self.began, weights))


def real_worker(setting: Setting, contender: Contender, rank: int) -> Worker:
    return Worker(setting, rank, lambda model, optimizer: build(contender, model, optimizer))


def simulated_runs(setting: Setting, rule: str) -> list[list[tuple[int, float, Tensor]]]:
    """What each of the simulated workers kept."""

    def work(comm: offbeat.Communicator) -> list[tuple[int, float, Tensor]]:
        worker = Worker(setting, comm.rank, lambda *built: offbeat_method(*built, rule, comm))
        worker.whole_run()
        return worker.kept

    return offbeat.simulate(work, WORKERS)


def curve(setting: Setting, kept: list[list[tuple[int, float, Tensor]]]) -> list[tuple[int, float, float]]:
    """Step, seconds of the slowest worker, and the validation loss of the workers' mean weights."""
    task, points = setting.task(), []
    model = task.model()
    for moment in zip(*kept, strict=True):
        vector_to_parameters(torch.stack([weights for _, _, weights in moment]).mean(0), model.parameters())
        seconds = max(seconds for _, seconds, _ in moment)
        points.append((moment[0][0], round(seconds, 3), round(task.evaluate(model), 5)))
    return points
