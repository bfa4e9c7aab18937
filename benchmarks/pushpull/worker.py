"""One worker of the benchmark of pushes and pulls, started like a torchrun script: JSON, a line per block."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.tasks import bytes_task

STEPS = 20


def counted() -> int:
    """Bytes the kernel has sent on all interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if not line.strip().startswith("lo:"))


class Contender:
    """A model that is trained some steps at a time."""

    def __init__(self, expression: str) -> None:
        self.task = bytes_task("medium")
        self.model: nn.Module = self.task.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batches = self.task.batches(dist.get_rank(), dist.get_world_size(), 2, 0)
        self.sync: offbeat.Synchronizer | None = None
        self.local: Callable[[], Any] = self.optimizer.step
        if expression == "DistributedDataParallel":
            self.model = DistributedDataParallel(self.model)
        elif expression != "alone":
            self.sync = offbeat.method(expression)(self.model, self.optimizer)
            self.local = self.sync.step
        self.steps(2)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.task.loss(self.model, next(self.batches)).backward()
            self.local()
            self.optimizer.zero_grad()
        if self.sync is not None:
            self.sync.state_dict()  # waits for what is in flight

    def reported(self) -> int:
        return 0 if self.sync is None else self.sync.totals.bytes_sent

    def block(self) -> dict[str, float]:
        dist.barrier()
        sent, reported, start = counted(), self.reported(), time.perf_counter()
        self.steps(STEPS)
        dist.barrier()
        seconds = (time.perf_counter() - start) / STEPS
        time.sleep(0.2)
        values = {"seconds": seconds, "counted": (counted() - sent) / STEPS}
        # A pull is in the report of its landing, one step after the last of the block.
        return {**values, "reported": (self.reported() - reported) / STEPS}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds, expressions = int(sys.argv[1]), sys.argv[2:]
    contenders = {expression: Contender(expression) for expression in expressions}
    for _ in range(rounds):
        for expression, contender in contenders.items():
            print(json.dumps({"contender": expression, **contender.block()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
