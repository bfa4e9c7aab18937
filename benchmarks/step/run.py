"""A step without a round ÷ the bare loop: 1.8 M parameters, forward and backward included.

    python benchmarks/step/run.py

The two loops take turns, step by step, on models of their own; prints the ratio of the medians.
"""

from __future__ import annotations

import statistics
import time

import torch

import offbeat
from offbeat.tasks import bytes_task

STEPS = 120


def main() -> None:
    torch.set_num_threads(1)
    task = bytes_task("medium")
    batches = task.batches(0, 1, 4, 0)
    bare, ours = task.model(), task.model()
    bare_optimizer, our_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (bare, ours))
    sync = offbeat.local_sgd(ours, our_optimizer, every=1_000_000)
    times: dict[str, list[float]] = {"bare": [], "offbeat": []}
    for step in range(STEPS):
        batch = next(batches)
        turns = [
            ("bare", bare, bare_optimizer, bare_optimizer.step),
            ("offbeat", ours, our_optimizer, sync.step),
        ]
        for name, model, optimizer, do in turns if step % 2 else turns[::-1]:
            start = time.perf_counter()
            task.loss(model, batch).backward()
            do()
            optimizer.zero_grad()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[10:]) for name, values in times.items()}
    pairs = [b / a for a, b in zip(times["bare"][10:], times["offbeat"][10:], strict=True)]
    print(f"bare {1000 * medians['bare']:.2f} ms, offbeat {1000 * medians['offbeat']:.2f} ms")
    print(f"ratio of medians {medians['offbeat'] / medians['bare']:.4f}")
    print(f"median of the ratios, step by step {statistics.median(pairs):.4f}")


if __name__ == "__main__":
    main()
