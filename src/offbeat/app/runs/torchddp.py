"""The honest baseline: torch's own DistributedDataParallel, which averages during the backward pass."""

# Not `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.app.runs.setting import Setting
from offbeat.app.runs.trainer import Costs, seconds_of
from offbeat.app.runs.watch import Watched
from offbeat.base.errors import CheckpointMismatch
from offbeat.comm.collective import nbytes, traffic
from offbeat.comm.throttled import Throttled
from offbeat.engine.checkpoint import weights_checksum
from offbeat.tasks import Batch, Task


class TorchDDP:
    """A trainer like the others, without anything of Offbeat's in the step.

    What it waits for hides inside the backward pass: it is the time of forward and backward beyond that of
    the same without averaging, measured on a few batches before the start. Behind a `Throttled` link, which
    is no network, a hook hands each bucket of gradients to the link in a thread of its own.
    """

    def __init__(
        self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched
    ) -> None:
        self.task, self.model, self.optimizer, self.comm = task, model, optimizer, comm
        self.ddp = DistributedDataParallel(model)
        self._task_queue = _TaskQueue(comm.comm) if isinstance(comm.comm, Throttled) else None
        if self._task_queue is not None:
            self.ddp.register_comm_hook(self._task_queue, _deliver)
        assert setting.batch is not None
        batches = task.batches(comm.rank, comm.size, setting.batch, setting.seed + 1)
        with self.ddp.no_sync():
            self._alone = seconds_of(task, self.ddp, batches, now=comm.now)
        gradients = nbytes([p for p in model.parameters() if p.requires_grad])
        buffers = nbytes(list(model.buffers()))
        self._sent = traffic("mean", comm.size, gradients) + traffic("broadcast", comm.size, buffers)
        self._costs = Costs()

    def step(self, batch: Batch) -> Tensor:
        """One iteration; its loss."""
        start = self.comm.now()
        loss = self.task.loss(self.ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        waited = max(0.0, self.comm.now() - start - self._alone)
        self.comm.waited += waited
        air = waited if self._task_queue is None else self._task_queue.flown()
        self._costs += Costs(1, self._sent, waited, air)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def rounds(self, ended: float) -> list[dict[str, Any]]:
        return []

    def costs(self) -> Costs:
        return self._costs

    @contextmanager
    def averaged(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        heard = self.comm.tell([weights_checksum(self.model)]).wait()
        if odd := [rank for rank, word in enumerate(heard) if word != heard[0]]:
            raise CheckpointMismatch(
                f"Rank {odd[0]}'s checkpoint has other weights than rank 0's: "
                "load the files of one run on every rank."
            )

    def leave(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self._task_queue is not None:
            self._task_queue.close()


class _TaskQueue:
    """A thread that takes buckets over the link, one after the other, as DDP's own connections do."""

    def __init__(self, comm: Throttled) -> None:
        self.comm = comm
        self._air = 0.0
        self._buckets: queue.SimpleQueue[tuple[Tensor, torch.futures.Future[Tensor]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def take(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        mean: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.put((bucket, mean))
        return mean

    def flown(self) -> float:
        """Seconds in the air since the last call."""
        air, self._air = self._air, 0.0
        return air

    def close(self) -> None:
        self._buckets.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (order := self._buckets.get()) is not None:
            bucket, mean = order
            start = self.comm.now()
            try:
                self.comm.mean([bucket]).wait()
            except Exception as error:  # to be raised by the backward pass that waits for it
                mean.set_exception(error)  # type: ignore[arg-type]
                return
            self._air += self.comm.now() - start
            mean.set_result(bucket)


def _deliver(task_queue: _TaskQueue, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return task_queue.take(bucket.buffer())
