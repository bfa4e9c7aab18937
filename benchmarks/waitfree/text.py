"""The same question as study.py's of another kind of model: a small GPT that reads Python, with AdamW.

    python benchmarks/waitfree/text.py          # 4 workers, a quarter delayed, two seeds
    python benchmarks/waitfree/text.py PATH     # another text

Adam's moments stay with each worker, so this also asks whether steps of the late can be added to newer
weights where a step is no multiple of a gradient. Appends to text.jsonl and prints a table.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from study import NETWORK, compute

import offbeat
from offbeat import Communicator, GroupReport
from offbeat.tasks import bytes_task

HERE = Path(__file__).parent
WORKERS, STEPS, SEEDS = 4, 200, 2
CONTENDERS = [
    "local_sgd(every=1)",
    "wagma(every=10, grace=0)",
    "wagma(every=10)",
    "wagma(every=10, late='add')",
    "wagma(every=20, late='add')",
]


def train(comm: Communicator, name: str, seed: int, path: str | None) -> tuple[float, float, float]:
    """Seconds, loss, and the share of rounds to which this worker came late."""
    task = bytes_task("tiny", data=path, seed=seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), task.lr)
    sync = offbeat.method(name)(model, optimizer, group=comm)
    batches = task.batches(rank=comm.rank, workers=comm.size, batch_size=task.batch_size, seed=seed)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = task.lr * (1 - step / STEPS)
        task.loss(model, next(batches)).backward()
        sync.step()
        optimizer.zero_grad()
    seconds = comm.now()
    kinds = [report.kind for report in sync.reports if isinstance(report, GroupReport)]
    sync.finish()
    return seconds, task.evaluate(model), sum(kind != "fresh" for kind in kinds) / max(1, len(kinds))


def measured(name: str, seed: int, path: str | None) -> dict[str, Any]:
    runs = offbeat.simulate(
        lambda comm: train(comm, name, seed, path),
        WORKERS,
        compute=compute("delayed", WORKERS, seed),
        network=NETWORK,
    )
    late = statistics.mean(late for _, _, late in runs)
    return {"method": name, "seed": seed, "seconds": runs[0][0], "loss": runs[0][1], "late": late}


def main() -> None:
    torch.set_num_threads(1)
    path = sys.argv[1] if len(sys.argv) > 1 else None
    firsts: list[dict[str, Any]] = []
    print("| method | speed | loss | ratio | late |\n|---|---|---|---|---|")
    for name in CONTENDERS:
        rows = [measured(name, seed, path) for seed in range(SEEDS)]
        firsts = firsts or rows
        with (HERE / "text.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        pairs = list(zip(rows, firsts, strict=True))
        cells = [
            f"`{name}`",
            f"{statistics.mean(first['seconds'] / row['seconds'] for row, first in pairs):.2f}",
            f"{statistics.mean(row['loss'] for row in rows):.4f}",
            f"{statistics.mean(row['loss'] / first['loss'] for row, first in pairs):.3f}",
            f"{statistics.mean(row['late'] for row in rows):.1%}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
