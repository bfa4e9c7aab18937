"""What do 64 simulated workers cost beyond their own work?

    python benchmarks/simulate/run.py

The digits task on 64 virtual workers in one process, against the same batches, forward and backward passes
and local steps in one plain loop. The two take turns; `speed` is the plain loop's time over the simulation's.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

import offbeat
from offbeat import Communicator
from offbeat.tasks import digits_task

WORKERS, STEPS, TURNS = 64, 16, 3
METHODS = ("local_sgd(every=8)", "diloco(every=8)", "cocod(every=8, delay=4)", "ddp()")
TASK = digits_task("small")


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    model = TASK.model()
    batches = TASK.batches(rank, WORKERS, 16, 0)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches


def plain() -> None:
    for rank in range(WORKERS):
        model, optimizer, batches = build(rank)
        for _ in range(STEPS):
            TASK.loss(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()


def simulated(expression: str) -> None:
    def worker(comm: Communicator) -> None:
        model, optimizer, batches = build(comm.rank)
        with offbeat.method(expression)(model, optimizer, group=comm) as sync:
            for _ in range(STEPS):
                TASK.loss(model, next(batches)).backward()
                sync.step()
                optimizer.zero_grad()

    offbeat.simulate(worker, WORKERS)


def seconds(call: object, *args: object) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    seconds(plain)
    print(f"| method | plain loop (s) | {WORKERS} workers simulated (s) | speed |\n|---|---|---|---|")
    for method in sys.argv[1:] or METHODS:
        turns = [(seconds(plain), seconds(simulated, method)) for _ in range(TURNS)]
        alone, together = (statistics.median(times) for times in zip(*turns, strict=True))
        print(f"| `{method}` | {alone:.2f} | {together:.2f} | {alone / together:.2f} |", flush=True)


if __name__ == "__main__":
    main()
