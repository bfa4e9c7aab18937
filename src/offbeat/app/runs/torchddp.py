"""The baseline: torch's own DistributedDataParallel, which averages during the backward pass."""

# Not `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.app.runs.setting import Setting
from offbeat.app.runs.trainer import Costs, time_step
from offbeat.app.runs.watch import Watched
from offbeat.base.errors import CheckpointMismatch
from offbeat.comm.background import ThreadQueue
from offbeat.comm.collective import nbytes, traffic
from offbeat.comm.throttled import Throttled
from offbeat.engine.agreement import weights_checksum
from offbeat.tasks import Batch, Task


class TorchDDP:
    """A trainer whose step uses nothing of Offbeat.

    DDP waits inside the backward pass. The exposed time is the time of forward and backward beyond that of
    the same without averaging, which is measured on a few batches before the start. DDP cannot see a
    `Throttled` link, so a hook passes each bucket of gradients through the link, in a thread.
    """

    averaged = staticmethod(nullcontext)

    def __init__(
        self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched
    ) -> None:
        self.task, self.model, self.optimizer, self.comm = task, model, optimizer, comm
        self.ddp = DistributedDataParallel(model)
        self._link = _Link(comm.comm) if isinstance(comm.comm, Throttled) else None
        if self._link is not None:
            self.ddp.register_comm_hook(self._link, _send)
        assert setting.batch is not None
        batches = task.batches(comm.rank, comm.size, setting.batch, setting.seed + 1)
        with self.ddp.no_sync():
            self._alone = time_step(task, self.ddp, batches, now=comm.now)
        gradients = nbytes([p for p in model.parameters() if p.requires_grad])
        buffers = nbytes(list(model.buffers()))
        self._sent = traffic("mean", comm.size, gradients) + traffic("broadcast", comm.size, buffers)
        self._costs = Costs()

    def step(self, batch: Batch) -> Tensor:
        """Run one iteration and return its loss."""
        start = self.comm.now()
        loss = self.task.loss(self.ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        exposed = max(0.0, self.comm.now() - start - self._alone)
        self.comm.waited += exposed
        air = exposed if self._link is None else self._link.take_air()
        self._costs += Costs(1, self._sent, exposed, air)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def take_rounds(self, ended: float) -> list[dict[str, Any]]:
        return []

    def costs(self) -> Costs:
        return self._costs

    def finish(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = self.comm.tell([weights_checksum(self.model)]).wait()
        if odd := [rank for rank, own in enumerate(sums) if own != sums[0]]:
            raise CheckpointMismatch(
                f"Rank {odd[0]}'s checkpoint has other weights than rank 0's: "
                "load the files of one run on every rank."
            )

    def leave(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self._link is not None:
            self._link.queue.abandon()


class _Link:
    """Sends buckets over a throttled link in a thread, one after the other, as DDP's own connections do."""

    def __init__(self, comm: Throttled) -> None:
        self.comm, self.queue, self._air = comm, ThreadQueue(), 0.0

    def send(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        mean: torch.futures.Future[Tensor] = torch.futures.Future()

        def job() -> None:
            start = self.comm.now()
            try:
                self.comm.mean([bucket]).wait()
            except Exception as error:  # raised by the backward pass that waits for the bucket
                mean.set_exception(error)  # type: ignore[arg-type]
                return
            self._air += self.comm.now() - start
            mean.set_result(bucket)

        self.queue.give(job)
        return mean

    def take_air(self) -> float:
        """Seconds in the air since the last call."""
        air, self._air = self._air, 0.0
        return air


def _send(link: _Link, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return link.send(bucket.buffer())
