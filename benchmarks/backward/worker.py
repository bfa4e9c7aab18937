"""One worker of the benchmark of the backward pass, started like a torchrun script; rank 0 prints JSON.

Contenders take turns: so many steps each in every repetition, so that noise of the machine hits all alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.engine import buckets
from offbeat.tasks import bytes_task

DDP, ALONE = "DistributedDataParallel", "no communication"
USUAL = buckets._EXACT_PARTS, buckets._CODED_PARTS  # unless a contender ends with '@' and a number
WARM = 2  # repetitions before the clock counts: DDP rearranges its buckets after its first step


def build(contender: str, batch: int) -> tuple[Callable[[], None], Callable[[], tuple[float, float]]]:
    """What makes a step of this contender, and what returns seconds waited and hidden so far."""
    task = bytes_task("medium")
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = task.batches(dist.get_rank(), dist.get_world_size(), batch, 0)
    trained = DistributedDataParallel(model) if contender == DDP else model
    call, _, parts = contender.partition("@")
    buckets._EXACT_PARTS, buckets._CODED_PARTS = (int(parts), int(parts)) if parts else USUAL
    sync = None if contender in (DDP, ALONE) else offbeat.method(call)(model, optimizer)

    def step() -> None:
        task.loss(trained, next(batches)).backward()
        (optimizer if sync is None else sync).step()
        optimizer.zero_grad()

    def spent() -> tuple[float, float]:
        return (0.0, 0.0) if sync is None else (sync.totals.seconds_waited, sync.totals.seconds_hidden)

    return step, spent


def main() -> None:
    repetitions, steps, batch, *contenders = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = {contender: build(contender, int(batch)) for contender in contenders}
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    work: dict[str, list[float]] = {contender: [] for contender in contenders}
    for repetition in range(int(repetitions) + WARM):
        for contender in contenders if repetition % 2 else reversed(contenders):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(int(steps)):
                runs[contender][0]()
            dist.barrier()  # the last worker counts
            if repetition >= WARM:
                times[contender].append((time.perf_counter() - start) / int(steps))
                work[contender].append((time.process_time() - busy) / int(steps))
    if dist.get_rank() == 0:
        ratios = {c: [a / b for a, b in zip(times[c], times[contenders[0]], strict=True)] for c in contenders}
        for contender in contenders:
            waited, hidden = runs[contender][1]()
            row = {"contender": contender, "step": statistics.median(times[contender])}
            row |= {"cpu": statistics.median(work[contender])}  # of all threads of rank 0
            row |= {"ratio": statistics.median(ratios[contender]), "ratios": ratios[contender]}
            made = (int(repetitions) + WARM) * int(steps)
            print(json.dumps({**row, "waited": waited / made, "hidden": hidden / made}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
