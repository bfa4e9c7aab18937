"""What does it cost in loss that the mean is one step old? A byte GPT, four workers, in simulation.

    python benchmarks/backward/study.py --data tinyshakespeare.txt

0.25 M parameters, 400 steps, a linear warm-up and a cosine, AdamW and SGD with momentum, three seeds.
Appends one line per run to study.jsonl beside this file, skips what is there already, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

import offbeat
from offbeat.tasks import Task, bytes_task

CORRECT = "Exchange(grads, delay=1, Correct())"  # own gradients, plus mean − own of the step before
METHODS = ["ddp()", "ddp(delay=1)", CORRECT]
RATES = {"AdamW": [3e-3, 1e-3], "SGD, momentum 0.9": [0.1]}
RESULTS = Path(__file__).parent / "study.jsonl"


def make_optimizer(kind: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if "momentum" in kind else 0.0)


def rate(step: int, steps: int, warmup: int = 40) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def worker(comm: offbeat.Communicator, task: Task, row: dict, args: argparse.Namespace) -> float:
    model = task.model()
    optimizer = make_optimizer(row["optimizer"], model, row["lr"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    batches = task.batches(comm.rank, comm.size, args.batch, row["seed"])
    if row["method"] == CORRECT:
        late = {"when": offbeat.Every(1), "delay": 1, "update": offbeat.Correct(), "buffers": "follow"}
        made = offbeat.Synchronizer(optimizer, [offbeat.Exchange(offbeat.grads(model), among=comm, **late)])
    else:
        made = offbeat.method(row["method"])(model, optimizer, group=comm)
    with made as sync:
        for _ in range(args.steps):
            task.loss(model, next(batches)).backward()
            sync.step(lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step()))
            optimizer.zero_grad()
            scheduler.step()
    return task.evaluate(model) if comm.rank == 0 else 0.0


def table(rows: list[dict]) -> str:
    """Mean losses, and the mean and spread over the seeds of their distance from `ddp()`."""
    losses: dict[tuple[str, float, str], dict[int, float]] = {}
    for row in rows:
        losses.setdefault((row["optimizer"], row["lr"], row["method"]), {})[row["seed"]] = row["loss"]
    lines = [
        "| optimizer | lr | method | loss | above `ddp()` | ± | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for (optimizer, lr, method), runs in sorted(losses.items()):
        base = losses[optimizer, lr, METHODS[0]]
        above = [100 * (runs[seed] / base[seed] - 1) for seed in runs if seed in base]
        spread = f"{statistics.stdev(above):.1f}" if len(above) > 1 else ""
        mean = f"{statistics.mean(runs.values()):.3f} | {statistics.mean(above):+.1f} %"
        lines.append(f"| {optimizer} | {lr:g} | `{method}` | {mean} | {spread} | {len(runs)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a text file; the standard library's source if not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    )
    for seed in range(args.seeds):
        wanted = [(kind, lr, method) for kind in args.optimizers for lr in RATES[kind] for method in METHODS]
        for kind, lr, method in wanted:
            row = {"method": method, "optimizer": kind, "lr": lr, "seed": seed, "steps": args.steps}
            if any(row.items() <= other.items() for other in rows):
                continue
            start, task = time.perf_counter(), bytes_task("tiny", data=args.data, seed=seed)
            loss = offbeat.simulate(lambda comm, t=task, r=row: worker(comm, t, r, args), 4)[0]
            rows.append({**row, "loss": loss, "seconds": time.perf_counter() - start})
            with args.results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
