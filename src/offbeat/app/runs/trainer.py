"""One training step with a method of Offbeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.app.runs.setting import Setting
from offbeat.app.runs.watch import Watched
from offbeat.engine.report import Report
from offbeat.tasks import Batch, Batches, Task


@dataclass
class Costs:
    """What training has cost a rank so far."""

    rounds: int = 0
    sent: int = 0  # bytes
    exposed: float = 0.0  # seconds the rank stood still for messages
    air: float = 0.0  # seconds its messages were in the air

    def __add__(self, other: Costs) -> Costs:
        return Costs(*[getattr(self, f.name) + getattr(other, f.name) for f in fields(self)])

    def __sub__(self, other: Costs) -> Costs:
        return Costs(*[getattr(self, f.name) - getattr(other, f.name) for f in fields(self)])


class Trainer:
    """A model, its optimizer and the synchronizer between them."""

    def __init__(
        self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched
    ) -> None:
        self.task, self.model, self.optimizer, self.comm = task, model, optimizer, comm
        self._reports: list[Report] = []
        self._ends: dict[int, float] = {}  # by step: the time it ended, without its waiting
        self.sync = sync = setting.build()(model, optimizer, group=comm)
        sync.on_report = self._reports.append
        self.averaged, self.finish = sync.averaged, sync.finish
        self.state_dict, self.load_state_dict = sync.state_dict, sync.load_state_dict

    def step(self, batch: Batch) -> Tensor:
        """Run one iteration and return its loss."""
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync.observe(loss.detach())
        self.sync.step(self._local)
        self.optimizer.zero_grad()
        return loss.detach()

    def _local(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def take_rounds(self, ended: float) -> list[dict[str, Any]]:
        """The rounds reported since the last call. `ended` is when the last step ended, without waiting."""
        self._ends[self.sync.steps] = ended
        rounds = [
            {
                "round": r.round,
                "begun_after": r.step,
                "began": self._ends.get(r.step, ended),
                "exposed": r.seconds_waited,
                "air": r.seconds_in_air,
                "sent": r.bytes_sent,
                "drift": r.drift,
                "norm": r.norm,
                "period": r.period,
            }
            for r in self._reports
        ]
        self._reports.clear()
        for old in [step for step in self._ends if step < self.sync.steps - 2000]:
            del self._ends[old]
        return rounds

    def costs(self) -> Costs:
        """All costs since this process began, evaluations included."""
        totals = self.sync.totals
        return Costs(totals.rounds, totals.bytes_sent, totals.seconds_waited, totals.seconds_in_air)

    def leave(self, error: BaseException) -> None:
        self.sync.__exit__(type(error), error, None)

    def close(self) -> None:
        pass


def time_step(
    task: Task, model: nn.Module, batches: Batches, *, now: Callable[[], float], steps: int = 4
) -> float:
    """The median seconds of a forward and backward pass. Restores the model and the random state."""
    buffers, rng = {name: b.clone() for name, b in model.named_buffers()}, torch.get_rng_state()
    seconds = []
    for _ in range(steps + 1):
        start = now()
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        seconds.append(now() - start)
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    torch.set_rng_state(rng)
    return sorted(seconds[1:])[steps // 2]
