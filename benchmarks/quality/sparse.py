"""Which outer rate does `sparse_loco` tolerate, with AdamW and with SGD? Digits, four workers, in simulation.

    python benchmarks/quality/sparse.py

Appends one line per run to sparse.jsonl beside this file, skips what is there already, and prints losses on
held-out digits as multiples of those of `local_sgd` with the same period.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch

import offbeat
from offbeat.tasks import digits_task

RESULTS = Path(__file__).parent / "sparse.jsonl"
LOCAL = [("sgd", 0.05), ("sgd", 0.2), ("adamw", 0.01)]  # optimizers and their largest rates
LENGTHS = [(4, 25), (16, 25), (4, 100)]  # periods and rounds
RATES = [1.0, 1.5, 2.0]


def loss(method: str, every: int, rounds: int, optimizer: str, lr: float) -> float:
    """With a warm-up of a tenth of the run, then a linear decay."""
    steps, task = every * rounds, digits_task("tiny")

    def worker(comm: offbeat.Communicator) -> float:
        model = task.model()
        sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        local = sgd if optimizer == "sgd" else torch.optim.AdamW(model.parameters(), lr=lr)
        shape = torch.optim.lr_scheduler.LambdaLR(
            local, lambda step: min(1, (step + 1) / (0.1 * steps)) * (1 - step / steps) + 0.01
        )
        batches = task.batches(comm.rank, comm.size, 16, 0)
        sync = offbeat.method(method)(model, local, group=comm)
        for _ in range(steps):
            task.loss(model, next(batches)).backward()
            sync.step()
            local.zero_grad()
            shape.step()
        sync.finish()
        return task.evaluate(model) if comm.rank == 0 else 0.0

    return offbeat.simulate(worker, 4)[0]


def table(rows: list[dict]) -> str:
    lines = ["| optimizer | every | rounds | " + " | ".join(f"lr={rate}" for rate in RATES) + " |"]
    lines.append("|---" * (3 + len(RATES)) + "|")
    found = {(r["optimizer"], r["lr"], r["every"], r["rounds"], r["outer"]): r["loss"] for r in rows}
    for (optimizer, lr), (every, rounds) in product(LOCAL, LENGTHS):
        base, *others = (found[optimizer, lr, every, rounds, outer] for outer in (None, *RATES))
        cells = " | ".join(f"{other / base:.2f}" for other in others)
        lines.append(f"| {optimizer} {lr} | {every} | {rounds} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    read = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [json.loads(line) for line in read]
    for (optimizer, lr), (every, rounds), outer in product(LOCAL, LENGTHS, [None, *RATES]):
        key = {"optimizer": optimizer, "lr": lr, "every": every, "rounds": rounds, "outer": outer}
        if not any(key.items() <= row.items() for row in rows):
            rate = "" if outer is None else f", lr={outer}"
            method = f"{'local_sgd' if outer is None else 'sparse_loco'}(every={every}{rate})"
            rows.append({**key, "method": method, "loss": loss(method, every, rounds, optimizer, lr)})
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
