"""Real workers, a quarter of which is delayed in each step: how fast is gradient coding?

    python benchmarks/coding/run.py        # 4 and 8 workers; about two minutes
    python benchmarks/coding/run.py 4

In each step a random quarter of the workers sleeps for eight times the computation of a batch. That
computation is a pause of 0.1 s beside a small model, so that more workers than processors do not slow each
other down. `gradient_code` computes stragglers + 1 batches per worker and step. `speed` is throughput ÷ that
of `ddp` at the same samples per step, its extra computation included. `equal`: all workers have the same
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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat

BATCH, DELAY, STEPS, EVEN = 0.1, 8 * 0.1, 40, 20
METHODS = ["ddp()", *(f"gradient_code(stragglers={late})" for late in (1, 2, 3))]


def late(step: int, workers: int) -> list[int]:
    return random.Random(step).sample(range(workers), max(1, workers // 4))


def train(method: str, steps: int, delay: float) -> dict[str, Any]:
    """The seconds of a step, the share of late answers, and whether all workers end with the same weights."""
    torch.manual_seed(0)
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = torch.randn(4 * workers * steps, 64, generator=torch.Generator().manual_seed(1))
    sync = offbeat.method(method)(model, optimizer)
    sync.start()

    def compute(x: torch.Tensor, weight: float, first: bool) -> None:
        time.sleep(BATCH + (delay if first and rank in late(sync.steps, workers) else 0.0))
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


def work() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train("ddp()", 3, 0.0)  # connects
    found = {m: (train(m, STEPS, DELAY), train(m, EVEN, 0.0)) for m in METHODS}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}")
    for workers in sys.argv[1:] or ["4", "8"]:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
        done = subprocess.run(
            [sys.executable, *command, str(Path(__file__)), "work"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=900,
        )
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        print(f"\n{workers} workers\n\n| method | ms per step | speed | late | equal | off | no delays |")
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


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
