"""One worker of the benchmarks of uneven workers, started like a torchrun script. Prints lines of JSON.

A step takes a given time: the worker sleeps for what the gradient leaves of it. So four workers fit on a few
cores, and other work on the machine changes little.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.tasks import digits_task
from offbeat.tasks.task import heavy_ball


class Pace:
    """Makes every step take as long as it should, from the end of the one before."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def wait(self) -> None:
        time.sleep(max(0.0, self._last + self._seconds - time.perf_counter()))

    def restart(self) -> None:
        self._last = time.perf_counter()


def straggle(expression: str, seconds: float, samples: int, seed: int) -> None:
    """Train until all workers together have used so many samples. Rank 3 needs twice the time of a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    task = digits_task("small", seed=seed)
    model, batch, evaluating = task.model(), 8, 0.0
    optimizer = heavy_ball(model.parameters(), 0.004)
    batches = task.batches(rank, world, batch, seed)
    sync, pace = offbeat.method(expression)(model, optimizer), Pace(seconds * (2 if rank == 3 else 1))
    sync.start()
    start, seen, used = time.perf_counter(), 0, 0
    while used < samples:
        task.loss(model, next(batches)).backward()
        pace.wait()
        sync.step()
        optimizer.zero_grad()
        if sync.rounds > seen:
            seen, began = sync.rounds, time.perf_counter()
            counts = torch.tensor([float(sync.steps)])
            dist.all_reduce(counts)
            used = int(counts) * batch
            with sync.averaged():
                loss = task.evaluate(model) if rank == 0 else 0.0
            dist.barrier()
            evaluating += time.perf_counter() - began
            if rank == 0:
                taken = time.perf_counter() - start - evaluating
                print(json.dumps({"samples": used, "seconds": taken, "loss": loss}), flush=True)
        pace.restart()
    sync.finish()


def budget(expression: str, seconds: float, duration: float) -> None:
    """Exchange 1 MB for so long. Print each round of this worker."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start, before = time.perf_counter(), 0.0

    def tell(report: offbeat.Report) -> None:
        nonlocal before
        now = time.perf_counter() - start
        told = {"t": now, "period": report.period, "waited": report.seconds_waited}
        print(json.dumps({**told, "flown": report.seconds_in_air, "seconds": now - before}), flush=True)
        before = now

    sync, pace = offbeat.method(expression)(model, optimizer), Pace(seconds)
    sync.on_report = tell
    stop = torch.zeros(1)
    while not stop.item():
        model(torch.ones(2, 256)).square().mean().backward()
        pace.wait()
        rounds = sync.rounds
        sync.step()
        optimizer.zero_grad()
        if sync.rounds > rounds:  # rank 0 says when it is over: the workers' clocks differ a little
            stop = torch.tensor([float(time.perf_counter() - start > duration)])
            dist.broadcast(stop, 0)
        pace.restart()
    sync.finish()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, expression, seconds, *rest = sys.argv[1:]
    if what == "straggle":
        straggle(expression, float(seconds), int(rest[0]), int(rest[1]))
    else:
        budget(expression, float(seconds), float(rest[0]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
