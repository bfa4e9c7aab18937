"""Real workers, a quarter of which is delayed in each step: how fast is gradient coding?

    python benchmarks/coding/run.py                      # all cases, with 4 and 8 workers; about ten minutes
    python benchmarks/coding/run.py communication 8      # one of them

A step of `ddp` takes 0.1 s without delays. In each step a quarter of the workers sleeps for eight times as
long, 0.8 s. There are three cases:

- `computation`: a batch takes 0.1 s, and messages next to nothing. Another quarter is delayed in each step.
- `communication`: a batch takes 0.02 s, and the mean of all gradients 0.08 s, behind a slow link.
- `same workers`: like `computation`, but the same quarter is delayed in all steps, the first ranks.

The computation of a batch is a pause beside a small model, so that more workers than processors do not slow
each other down. `gradient_code` computes stragglers + 1 batches per worker and step. `speed` is throughput ÷
that of `ddp` at the same samples per step, its extra computation included. `equal`: all workers have the same
weights, to the bit. The last column is the speed without delays.
"""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.comm.throttled import FRAMING, Throttled

STEP, DELAY, STEPS, EVEN = 0.1, 0.8, 30, 10


class Case(NamedTuple):
    batch: float  # seconds
    same: bool
    methods: tuple[str, ...]


CODES = tuple(f"gradient_code(stragglers={late})" for late in (1, 2, 3))
CASES = {
    "computation": Case(STEP, False, CODES),
    "communication": Case(0.2 * STEP, False, CODES),
    "same workers": Case(STEP, True, (CODES[0], "gradient_code(stragglers=1, dynamic=True)")),
}


def late(step: int, workers: int, same: bool) -> list[int]:
    quarter = max(1, workers // 4)
    return list(range(quarter)) if same else random.Random(step).sample(range(workers), quarter)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def connect(case: Case) -> offbeat.Communicator:
    """The workers' link, on which the mean of all gradients takes what a batch leaves of a step."""
    comm = offbeat.Torch()
    if case.batch == STEP:
        return comm
    sent = 2 * (comm.size - 1) / comm.size * 4 * sum(p.numel() for p in build().parameters())
    return Throttled(comm, rate=sent * FRAMING / (STEP - case.batch))


def train(comm: offbeat.Communicator, case: Case, method: str, steps: int, delay: float) -> dict[str, Any]:
    """The seconds of a step, the share of late answers, and whether all workers end with the same weights."""
    rank, workers, model = comm.rank, comm.size, build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = torch.randn(4 * workers * steps, 64, generator=torch.Generator().manual_seed(1))
    sync = offbeat.method(method)(model, optimizer, group=comm)
    sync.start()

    def compute(x: torch.Tensor, weight: float, first: bool) -> None:
        delayed = first and rank in late(sync.steps, workers, case.same)
        time.sleep(case.batch + (delay if delayed else 0.0))
        (weight * model(x).square().mean()).backward()

    dist.barrier()
    began = time.perf_counter()
    if method == "ddp()":
        for step in range(steps):
            compute(dataset[4 * workers * step :][rank : 4 * workers : workers], 1.0, True)
            sync.step()
            optimizer.zero_grad()
    else:
        for parts in offbeat.coded_sampler(dataset, sync, batch_size=4, shuffle=False):
            for place, part in enumerate(parts):
                compute(part.load(), part.weight, place == 0)
            sync.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - began
    reports = [report.late for report in sync.reports]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    all_weights = [torch.empty_like(weights) for _ in range(workers)]
    dist.all_gather(all_weights, weights)
    ends: list[Any] = [None] * workers
    dist.all_gather_object(ends, (seconds, sum(reports) / len(reports)))
    sync.finish()
    return {
        "seconds": min(end for end, _ in ends) / steps,
        "late": sum(share for _, share in ends) / workers,
        "equal": all(torch.equal(weights, other) for other in all_weights),
        "weights": weights.tolist()[:50],
    }


def work(name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[name]
    comm = connect(case)
    train(comm, case, "ddp()", 3, 0.0)  # connects
    methods = ("ddp()", *case.methods)
    found = {m: (train(comm, case, m, STEPS, DELAY), train(comm, case, m, EVEN, 0.0)) for m in methods}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def show(name: str, workers: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
    done = subprocess.run(
        [sys.executable, *command, str(Path(__file__)), "work", name],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print(f"\n{name}, {workers} workers\n\n| method | ms per step | speed | late | equal | off | no delays |")
    print("|---|---|---|---|---|---|---|")
    first, even = found["ddp()"]
    for method, (row, alike) in found.items():
        off = max(abs(a - b) for a, b in zip(row["weights"], first["weights"], strict=True))
        print(
            f"| `{method}` | {1000 * row['seconds']:.0f} | {first['seconds'] / row['seconds']:.2f} | "
            f"{row['late']:.0%} | {'yes' if row['equal'] else 'no'} | {off:.0e} | "
            f"{even['seconds'] / alike['seconds']:.2f} |",
            flush=True,
        )


def main() -> None:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}")
    names, sizes = [sys.argv[1]] if sys.argv[1:] else list(CASES), sys.argv[2:] or ["4", "8"]
    for name in names:
        for workers in sizes:
            show(name, workers)


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["work"] else main()
