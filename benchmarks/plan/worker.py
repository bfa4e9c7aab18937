"""One worker of the planner's benchmark, started like a torchrun script; rank 0 prints a line of JSON.

The step is a pause, as long as an accelerator would be busy, and the optimizer's own work: four workers share
a small machine here, and shall not compete for it. First steps and link are measured, then each method runs.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.among import communicator
from offbeat.plan.measure import Measured, measure_link
from offbeat.simulate import Jittered, Stragglers
from offbeat.tasks import bytes_task

EVEN = Jittered(0.12, jitter=0.1)
LATE = Stragglers(EVEN, chance=0.1, delay=0.4)
MEASURED = 24


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = bytes_task("small").model()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def steps_of(rank: int, late: bool) -> Measured:
    """Pauses and local steps without any communication."""
    model, optimizer = build()
    seconds = []
    for step in range(MEASURED):
        start = time.perf_counter()
        time.sleep((LATE if late else EVEN)(rank, step))
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return Measured(tuple(seconds), sum(p.numel() for p in model.parameters()), "float32")


def run(expression: str, steps: int, late: bool) -> float:
    """Seconds from building the synchronizer to the end of finish(), as the slowest worker has them."""
    comm = communicator()
    model, optimizer = build()
    dist.barrier()
    start = time.perf_counter()
    sync = offbeat.method(expression)(model, optimizer)
    for step in range(steps):
        time.sleep((LATE if late else EVEN)(comm.rank, step))
        sync.step()
    sync.finish()
    seconds = time.perf_counter() - start
    return max(word[0] for word in comm.tell([round(seconds * 1e9)]).wait()) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = communicator()
    network, points = measure_link(comm)
    steps = {late: steps_of(comm.rank, late) for late in (False, True)}
    rows = {str(late): measured.gather(comm).rows for late, measured in steps.items()}
    runs = [
        (method, number, late, run(method, number, late)) for method, number, late in json.loads(sys.argv[1])
    ]
    if comm.rank == 0:
        told = {"parameters": steps[False].parameters, "network": asdict(network), "points": points}
        print(json.dumps({**told, "rows": rows, "runs": runs}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
