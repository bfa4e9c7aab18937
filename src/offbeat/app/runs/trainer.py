"""One training step and its costs, with a method of Offbeat or with torch's DistributedDataParallel."""

# Not `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.app.runs.setting import Setting
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.tensors import clean_names
from offbeat.comm.background import Sidecar, TaskQueue, ThreadQueue
from offbeat.comm.collective import Collective, nbytes, traffic
from offbeat.comm.communicator import Communicator, Pending, Wrapped
from offbeat.comm.throttled import Throttled
from offbeat.engine.agreement import weights_checksum
from offbeat.engine.report import Report
from offbeat.methods.expression import method
from offbeat.tasks import Batch, Task

TIMED = 4  # steps that DDP is timed on before the start
T = TypeVar("T")


class Watched(Wrapped):
    """Another communicator; `waited` adds up the seconds that the creating thread waits for messages."""

    def __init__(self, comm: Communicator, root: "Watched | None" = None) -> None:
        super().__init__(comm)
        self._root, self._owner = root or self, threading.get_ident()
        self.waited, self._inside = 0.0, False

    def wrap(self, comm: Communicator) -> Communicator:
        return Watched(comm, self._root)

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> Pending[list[Tensor]]:
        return self.watch(self.comm.run(kind, tensors, src=src, control=control))

    def watch(self, message: Pending[T]) -> Pending[T]:
        def wait() -> T:
            with self.waiting():
                return message.wait()

        return Pending(wait, message.done, message.arrived)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside, unless it is a background thread's or is counted already."""
        root = self._root
        if root._inside or threading.get_ident() != root._owner:
            yield
            return
        start, root._inside = self.comm.now(), True
        try:
            yield
        finally:
            root._inside = False
            root.waited += self.comm.now() - start

    def task_queue(self) -> TaskQueue:
        """A queue whose results count as waited for."""
        queue = self.comm.worker.task_queue()
        give = queue.give
        queue.give = lambda job: self.watch(give(job))  # type: ignore[method-assign]
        return queue

    def sidecar(self) -> Sidecar:
        """A sidecar whose `until` counts as waiting."""
        sidecar = self.comm.worker.sidecar()
        until = sidecar.until

        def watch(ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
            with self.waiting():
                return until(ready, what, seconds)

        sidecar.until = watch  # type: ignore[method-assign]
        return sidecar


class Stopwatch:
    """The seconds of a run, without those in which the clock was stopped. Set `elapsed` only then."""

    def __init__(self, now: Callable[[], float], elapsed: float = 0.0) -> None:
        self._now, self.elapsed, self._since, self._running = now, elapsed, now(), True

    def read(self) -> float:
        return self.elapsed + (self._now() - self._since if self._running else 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.elapsed, self._running = self.read(), False
        yield
        self._since, self._running = self._now(), True


@dataclass
class Costs:
    """What training has cost a rank so far."""

    rounds: int = 0
    sent: int = 0  # bytes
    exposed: float = 0.0  # seconds the rank stood still for messages
    air: float = 0.0  # seconds its messages were in flight

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: "Costs") -> "Costs":
        return Costs(*map(operator.sub, astuple(self), astuple(other)))


class Trainer:
    """A model, its optimizer and the synchronizer between them."""

    def __init__(self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched):
        self.task, self.model, self.optimizer = task, model, optimizer
        self._reports: list[Report] = []
        self._ends: dict[int, float] = {}  # by step: the time it ended, without its waiting
        self.sync = sync = method(setting.method)(model, optimizer, group=comm)
        sync.on_report = self._reports.append
        self.averaged, self.finish = sync.averaged, sync.finish
        self.state_dict, self.load_state_dict = sync.state_dict, sync.load_state_dict

    def resize(self, state: dict[str, Any], models: Sequence[dict[str, Tensor]]) -> None:
        """Continue from a state of another number of workers. Each of its models is with one worker."""
        self.sync.load_state_dict(state, resize=True)
        self.sync._count_weights([clean_names(model.items()) for model in models])

    def begin(self) -> bool:
        """Whether this worker computes anything in the coming step."""
        return True

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
        self._ends.setdefault(self.sync.steps, ended)  # an evaluation later does not change it
        rounds = [
            {
                "round": r.round, "begun_after": r.step, "began": self._ends.get(r.step, ended),
                "exposed": r.seconds_waited, "air": r.seconds_in_air, "sent": r.bytes_sent,
                "drift": r.drift, "norm": r.norm, "period": r.period,
            }
            for r in self._reports
        ]  # fmt: skip
        self._reports.clear()
        self._ends.pop(self.sync.steps - 2001, None)
        return rounds

    def costs(self) -> Costs:
        """All costs since this process began, evaluations included."""
        totals = self.sync.totals
        return Costs(totals.rounds, totals.bytes_sent, totals.seconds_waited, totals.seconds_in_air)

    def leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell the others if this worker has failed."""
        if error is not None:
            self.sync.__exit__(kind, error, trace)


class TorchDDP:
    """A trainer whose step uses nothing of Offbeat. DDP averages, and waits, during the backward pass.

    The exposed time is the time of forward and backward beyond that of the same without averaging, measured
    on a few batches before the start. DDP cannot see a `Throttled` link, so a hook passes each bucket of
    gradients through the link, in a thread.
    """

    averaged = staticmethod(nullcontext)

    def __init__(self, setting: Setting, task: Task, model: nn.Module, optimizer: Optimizer, comm: Watched):
        self.task, self.model, self.optimizer, self.comm = task, model, optimizer, comm
        self.ddp, self._costs = DistributedDataParallel(model), Costs()
        self._link = _Link(comm.comm) if isinstance(comm.comm, Throttled) else None
        if self._link is not None:
            self.ddp.register_comm_hook(self._link, _Link.send)
        self._alone = self._time_alone(setting)
        gradients = nbytes([p for p in model.parameters() if p.requires_grad])
        buffers = nbytes(list(model.buffers()))
        self._sent = traffic("mean", comm.size, gradients) + traffic("broadcast", comm.size, buffers)

    def _time_alone(self, setting: Setting) -> float:
        """The median seconds of a forward and backward pass without averaging. Restores what it changes."""
        assert setting.batch is not None
        batches = self.task.batches(self.comm.rank, self.comm.size, setting.batch, setting.seed + 1)
        buffers, rng = [b.clone() for b in self.model.buffers()], torch.get_rng_state()
        seconds = []
        with self.ddp.no_sync():
            for _ in range(TIMED + 1):
                start = self.comm.now()
                self.task.loss(self.ddp, next(batches)).backward()  # type: ignore[no-untyped-call]
                seconds.append(self.comm.now() - start)
        for p in self.model.parameters():
            p.grad = None
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        torch.set_rng_state(rng)
        return sorted(seconds[1:])[TIMED // 2]

    def begin(self) -> bool:
        return True

    def step(self, batch: Batch) -> Tensor:
        """Run one iteration and return its loss."""
        start = self.comm.now()
        loss = self.task.loss(self.ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        exposed = max(0.0, self.comm.now() - start - self._alone)
        self.comm.waited += exposed
        air = exposed
        if self._link is not None:
            air, self._link.air = self._link.air, 0.0
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
            reason = "has other weights than rank 0's: load the files of one run on every rank."
            raise CheckpointMismatch(f"Rank {odd[0]}'s checkpoint {reason}")

    def resize(self, state: dict[str, Any], models: Sequence[dict[str, Tensor]]) -> None:
        self.load_state_dict(state)  # all models are equal

    def leave(self, *error: object) -> None:
        if self._link is not None:
            self._link.queue.abandon()


class _Link:
    """Sends buckets over a throttled link in a thread, one after the other, as DDP's own connections do."""

    def __init__(self, comm: Throttled) -> None:
        self.comm, self.queue, self.air = comm, ThreadQueue(), 0.0

    def send(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        mean: torch.futures.Future[Tensor] = torch.futures.Future()
        gradients = bucket.buffer()

        def job() -> None:
            start = self.comm.now()
            try:
                self.comm.mean([gradients]).wait()
            except Exception as error:  # raised by the backward pass that waits for the bucket
                mean.set_exception(error)  # type: ignore[arg-type]
                return
            self.air += self.comm.now() - start
            mean.set_result(gradients)

        self.queue.give(job)
        return mean
