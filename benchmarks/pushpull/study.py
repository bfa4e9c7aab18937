"""The loss at equal steps against synchronous SGD: pulls every 2, 5 and 10 steps, with and without GLU.

    python benchmarks/pushpull/study.py digits
    python benchmarks/pushpull/study.py images --data cifar10-jpeg.zip --cache pictures

4 workers in simulation; SGD with momentum 0.9, the rate falling by a cosine. Each run is a line of
results.jsonl, and runs that are there already are not repeated; `--table` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.tasks import Task, digits_task, images_task

RESULTS = Path(__file__).parent / "results.jsonl"
STEPS = {"digits": 300, "images": 300}
WARMUP = {"digits": 50, "images": 50}
RATES = {"digits": [0.0125, 0.05], "images": [0.0125, 0.05]}
PLAIN, GLU = "alpha=1.0, beta=0.0", "alpha=2.0, beta=0.5"


def methods(name: str) -> list[str]:
    warmup = WARMUP[name]
    rows = ["ddp()", f"od_sgd(warmup={warmup})"]
    rows += [f"ssd_sgd(every={k}, warmup={warmup}, {rule})" for k in (2, 5, 10) for rule in (PLAIN, GLU)]
    return rows


def train(comm: offbeat.Communicator, task: Task, name: str, method: str, lr: float, seed: int) -> Any:
    steps = STEPS[name]
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps))
    )
    batches = task.batches(comm.rank, comm.size, 16, seed)
    losses = []
    with offbeat.method(method)(model, optimizer, group=comm) as sync:
        for _ in range(steps):
            loss = task.loss(model, next(batches))
            loss.backward()
            sync.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    held_out = task.evaluate(model) if comm.rank == 0 else 0.0
    accuracy = task.accuracy(model) if comm.rank == 0 and task.accuracy else 0.0
    return statistics.mean(losses[-30:]), held_out, accuracy, sync.totals.bytes_sent


def run(task: Task, name: str, method: str, lr: float, seed: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = offbeat.simulate(lambda comm: train(comm, task, name, method, lr, seed), 4)
    _, held_out, accuracy, sent = answers[0]
    told = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return {
        "task": name,
        "method": method,
        "lr": lr,
        "seed": seed,
        "train": statistics.mean(answer[0] for answer in answers),
        "held_out": held_out,
        "accuracy": accuracy,
        "MB": sent / 1e6,
        "warned": any("PushPull" in text for text in told),
    }


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> None:
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for row in known():
        found[row["task"], row["lr"], row["method"]].append(row)
    print("| task | lr | method | held-out loss | ± | accuracy | warned | seeds |")
    print("|---|---|---|---|---|---|---|---|")
    for (task, lr, method), rows in sorted(found.items(), key=lambda item: item[0][:2]):
        losses = [row["held_out"] for row in rows]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        accuracy = statistics.mean(row["accuracy"] for row in rows)
        warned = sum(row["warned"] for row in rows)
        print(
            f"| {task} | {lr} | `{method}` | {statistics.mean(losses):.4f} | {spread:.4f} | {accuracy:.1%} | "
            f"{warned} of {len(rows)} | {len(rows)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", nargs="?", choices=["digits", "images"], default="digits")
    parser.add_argument("--data")
    parser.add_argument("--cache")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="*")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        table()
        return
    torch.set_num_threads(1)
    for seed in range(chosen.seeds):
        task = (
            digits_task(chosen.size, seed=seed)
            if chosen.task == "digits"
            else images_task(chosen.size, data=chosen.data, cache=chosen.cache, seed=seed)
        )
        for lr in chosen.rates or RATES[chosen.task]:
            for method in methods(chosen.task):
                mark = (chosen.task, method, lr, seed)
                if any((r["task"], r["method"], r["lr"], r["seed"]) == mark for r in known()):
                    continue
                row = run(task, chosen.task, method, lr, seed)
                print(row, flush=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
