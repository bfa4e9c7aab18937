"""What makes a step: a method of Offbeat's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """What training has cost a rank so far: rounds, bytes, seconds waited and seconds in the air."""

    rounds: int = 0
    sent: int = 0
    waited: float = 0.0
    air: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(*[getattr(self, f.name) + getattr(other, f.name) for f in fields(self)])

    def __sub__(self, other: Costs) -> Costs:
        return Costs(*[getattr(self, f.name) - getattr(other, f.name) for f in fields(self)])


class Trainer:
    """A model, its optimizer, and the synchronizer between them."""

    def __init__(
        self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched
    ) -> None:
        self.task, self.model, self.optimizer, self.comm = task, model, optimizer, comm
        self.sync = setting.build()(model, optimizer, group=comm)
        self.sync.on_report = self._take
        self._fresh: list[Report] = []
        self._ended: dict[int, float] = {}

    def step(self, batch: Batch) -> Tensor:
        """One iteration; its loss."""
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync.observe(loss.detach())
        self.sync.step(self._local)
        self.optimizer.zero_grad()
        return loss.detach()

    def _local(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _take(self, report: Report) -> None:
        self._fresh.append(report)

    def rounds(self, ended: float) -> list[dict[str, Any]]:
        """The rounds reported since the last call; `ended` is when the last step did but for its waiting."""
        self._ended[self.sync.steps] = ended
        told = [
            {
                "round": r.round,
                "begun_after": r.step,
                "began": self._ended.get(r.step, ended),
                "waited": r.seconds_waited,
                "air": r.seconds_in_air,
                "sent": r.bytes_sent,
                "drift": r.drift,
                "norm": r.norm,
                "period": r.period,
            }
            for r in self._fresh
        ]
        self._fresh.clear()
        for old in [step for step in self._ended if step < self.sync.steps - 2000]:
            del self._ended[old]
        return told

    def costs(self) -> Costs:
        """All since this process began, evaluations included."""
        totals = self.sync.totals
        return Costs(totals.rounds, totals.bytes_sent, totals.seconds_waited, totals.seconds_in_air)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with self.sync.averaged():
            yield

    def finish(self) -> None:
        self.sync.finish()

    def state_dict(self) -> dict[str, Any]:
        return self.sync.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sync.load_state_dict(state)

    def leave(self, error: BaseException) -> None:
        self.sync.__exit__(type(error), error, None)

    def close(self) -> None:
        pass


def seconds_of(
    task: Task, model: nn.Module, batches: Batches, *, now: Callable[[], float], steps: int = 4
) -> float:
    """Seconds of a forward and backward pass, the median; model and random state stay as they are."""
    kept, rng = {name: b.clone() for name, b in model.named_buffers()}, torch.get_rng_state()
    taken = []
    for _ in range(steps + 1):
        start = now()
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        taken.append(now() - start)
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(kept[name])
    torch.set_rng_state(rng)
    return sorted(taken[1:])[steps // 2]
