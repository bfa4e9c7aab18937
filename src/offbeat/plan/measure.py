"""Measure the step of a task or a script, and the link between the workers."""

import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from offbeat.base.tensors import trainable
from offbeat.comm.collective import nbytes, traffic
from offbeat.comm.communicator import Communicator, Pending
from offbeat.simulate import Network, Recorded
from offbeat.tasks import Task

_WARM = 3  # steps that are not timed
_SIZES = tuple(4 * 4**power for power in range(6, 13))  # floats in a sweep of the link: 64 kB to 256 MB
_ENOUGH = 0.5  # seconds of a message after which no longer one is tried, if it is twice the shortest


@dataclass(frozen=True)
class Measured:
    """The seconds of this worker's steps, and the number and dtype of its parameters."""

    seconds: tuple[float, ...]
    parameters: int
    dtype: str

    @classmethod
    def of(cls, seconds: Iterable[float], parameters: Iterable[Tensor]) -> "Measured":
        held = list(parameters)
        return cls(tuple(seconds), sum(p.numel() for p in held), str(held[0].dtype).removeprefix("torch."))

    def gather(self, comm: Communicator) -> Recorded:
        """Return the steps of all workers."""
        times = torch.tensor(self.seconds, dtype=torch.float64)
        return Recorded(tuple(tuple(part.tolist()) for part in comm.gather(times).wait()))


def measure_task(task: Task, comm: Communicator, *, steps: int = 20, batch: int | None = None) -> Measured:
    """Time the forward and backward pass and the local step of a task, on all workers at once."""
    model = task.model()
    optimizer = task.optimizer(model.parameters(), task.lr)
    batches = task.batches(comm.rank, comm.size, batch or task.batch_size, 0)

    def step() -> float:
        start = time.perf_counter()
        torch.autograd.backward(task.loss(model, next(batches)))
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    comm.tell([0]).wait()
    seconds = [step() for _ in range(_WARM + steps)][_WARM:]
    ready = comm.tell([0])
    while not ready.done():  # workers that share a machine slow each other down, as in a real run
        step()
    ready.wait()
    return Measured.of(seconds, trainable(model).values())


class _Enough(BaseException):
    """Enough steps were timed."""


def measure_script(path: str, arguments: list[str], *, steps: int = 20) -> Measured:
    """Run a training script until its optimizer has made enough steps. Time each from the one before."""
    if not Path(path).is_file():
        raise ValueError(f"There is no script {path!r} to measure.")
    marks, found = list[float](), dict[int, Tensor]()

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        marks.append(time.perf_counter())
        found.update({id(p): p for group in optimizer.param_groups for p in group["params"]})
        if len(marks) > _WARM + steps:
            raise _Enough

    hook = register_optimizer_step_post_hook(note)
    before, sys.argv = sys.argv, [path, *arguments]
    try:
        with suppress(_Enough, SystemExit):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
        hook.remove()
    if len(marks) < _WARM + 2:
        raise ValueError(f"{path!r} makes {len(marks)} optimizer steps; it must make at least {_WARM + 2}.")
    return Measured.of((after - before for before, after in pairwise(marks[_WARM:])), found.values())


def measure_link(comm: Communicator, *, repetitions: int = 3) -> tuple[Network, list[tuple[int, float]]]:
    """Return a network fitted to collectives of growing size; and bytes and seconds of each all-reduce."""
    points: list[tuple[int, float]] = []
    for number in _SIZES:
        tensor = torch.zeros(number)
        slowest = _time(comm, lambda: comm.mean([tensor]).wait(), repetitions)  # noqa: B023  # called at once
        points.append((traffic("mean", comm.size, 4 * number), slowest))
        if slowest > max(_ENOUGH, 2 * points[0][1]):
            break
    # The line through the two longest messages. A shaped link lets short bursts pass, so that it may start
    # below zero: then take the line from zero to the longest message.
    (x0, y0), (x1, y1) = points[-2:]
    slope = (y1 - y0) / (x1 - x0)
    latency = y1 - slope * x1
    if slope <= 0 or latency <= 0:
        latency, slope = 0.0, y1 / x1
    part = tensor[: number // comm.size]

    def share(kind: str, given: Tensor, send: Callable[[], Pending[list[Tensor]]]) -> tuple[str, float]:
        """Return the share of an all-reduce's bandwidth that two other collectives in flight reach."""
        seconds = _time(comm, lambda: [message.wait() for message in [send(), send()]], 1)
        return kind, min(1.0, 2 * traffic(kind, comm.size, nbytes([given])) / seconds * slope)

    shares = (
        share("gather", part, lambda: comm.gather(part)),
        share("exchange", tensor, lambda: comm.exchange([part] * comm.size)),
        share("broadcast", tensor, lambda: comm.broadcast([tensor])),
    )
    return Network(latency / (2 * (comm.size - 1)), 1 / slope, "ring", shares=shares), points


def _time(comm: Communicator, call: Callable[[], object], repetitions: int) -> float:
    """Return the median seconds of a call, on the slowest worker."""
    call()
    times = []
    for _ in range(repetitions):
        comm.tell([0]).wait()  # all start together
        start = comm.now()
        call()
        times.append(comm.now() - start)
    return max(word[0] for word in comm.tell([round(statistics.median(times) * 1e9)]).wait()) / 1e9
