"""Training with coded gradients: a worker computes several parts of a batch, until the others are done."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.app.runs.setting import Setting
from offbeat.app.runs.trainer import Trainer, Watched
from offbeat.base.draws import draw_whole
from offbeat.tasks import Batch, Task
from offbeat.waitfree import CodedGradients
from offbeat.waitfree.sampler import seeded


class CodedTrainer(Trainer):
    """A trainer for `gradient_code`. Part j of a step is the batch that rank j would have with `ddp`."""

    def __init__(self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched):
        super().__init__(setting, task, model, optimizer, comm)
        (part,) = self.sync.parts
        assert isinstance(part, CodedGradients)
        self.coded, self._seed, self._loss = part, setting.seed, torch.tensor(0.0)

    def begin(self) -> bool:
        """Whether the step has parts to compute. Starts the first one."""
        self.sync.start()
        if self.coded.active:
            self.coded.open(self.sync.steps)
        return not self.coded.is_over(self.sync.steps)

    def step(self, batch: Any) -> Tensor:
        """Run one iteration and return the mean loss of its parts, or the last one if there are none."""
        losses, step = [], self.sync.steps
        self.coded.unfinished = self.coded.load
        for number, coefficient in self.coded.hand_out(step):
            with seeded(draw_whole(self._seed, step, number, "part") >> 1, self.model):
                loss = self.task.loss(self.model, batch[number])
                (coefficient * loss).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        self._loss = torch.stack(losses).mean() if losses else self._loss
        self.sync.step(self._local)
        self.optimizer.zero_grad()
        return self._loss


class PartBatches(Iterator[dict[int, Batch]]):
    """The batches of the parts that a worker may compute, of which every one is read in every step."""

    def __init__(self, task: Task, coded: CodedGradients, batch_size: int, seed: int) -> None:
        everyone = coded.peers.everyone
        own = [number for number, _ in coded.clusters.parts(everyone.rank)]
        numbers = range(everyone.size) if coded.dynamic else own
        self._streams = {n: task.batches(n, everyone.size, batch_size, seed) for n in numbers}

    def __next__(self) -> dict[int, Batch]:
        return {number: next(stream) for number, stream in self._streams.items()}

    def state_dict(self) -> dict[str, Any]:
        return {str(number): stream.state_dict() for number, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, stream in self._streams.items():
            stream.load_state_dict(state[str(number)])
