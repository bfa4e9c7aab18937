"""Validation loss of every method at equal tokens: a byte-level GPT, four workers, in simulation.

    python benchmarks/quality/run.py --data tinyshakespeare.txt            # three seeds of each method below
    python benchmarks/quality/run.py --data tinyshakespeare.txt --seeds 1 'diloco(every=16, lr=0.5)'

Appends one line per run to results.jsonl beside this file, skips what is there already, and prints the table.
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

H = 16
METHODS = [
    "ddp()",
    f"local_sgd(every={H})",
    f"post_local_sgd(switch=100, every={H})",
    f"hierarchical(nodes=2, inner=4, outer={H})",
    "qsr(alpha=0.006, base=4, warmup=40, peak=0.003)",
    f"adaptive(start={H}, sample=100)",
    f"adacomm(start={H}, interval=50)",
    f"cocod(every={H}, delay=8)",
    f"dasgd(every={H}, delay=8)",
    f"overlap_local_sgd(every={H})",
    f"slowmo(every={H})",
    f"diloco(every={H})",
    f"streaming_diloco(every={H}, fragments=3, delay=4, reduce=Mean())",
    f"eager_diloco(every={H})",
    f"eager_diloco(every={H}, lr=0.7, momentum=0.9)",
    f"palsgd(every={H})",
    f"noloco(every={H})",
    f"diloco(every={H}, lr=1.0, momentum=0.3)",
    f"diloco(every={H}, lr=1.0, momentum=0.3, warmup=100)",
    f"slowmo(every={H}, momentum=0.3, warmup=100)",
]
RESULTS = Path(__file__).parent / "results.jsonl"


def rate(step: int, steps: int, warmup: int = 40) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def worker(
    comm: offbeat.Communicator, task: Task, expression: str, seed: int, args: argparse.Namespace
) -> dict:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    batches = task.batches(comm.rank, comm.size, args.batch, seed)
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    for _ in range(args.steps):
        loss = task.loss(model, next(batches))
        loss.backward()
        sync.observe(loss)
        sync.step(lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step()))
        optimizer.zero_grad()
        scheduler.step()
    with sync.averaged():
        shown = task.evaluate(model) if comm.rank == 0 else 0.0
    totals = sync.totals
    sync.finish()
    last = task.evaluate(model) if comm.rank == 0 else 0.0
    return {"loss": last, "averaged": shown, "rounds": totals.rounds, "megabytes": totals.bytes_sent / 1e6}


def run(expression: str, seed: int, args: argparse.Namespace) -> dict:
    torch.manual_seed(seed)
    task = bytes_task(args.size, data=args.data, seed=seed)
    start = time.perf_counter()
    result = offbeat.simulate(lambda comm: worker(comm, task, expression, seed, args), args.workers)[0]
    setting = {
        "size": args.size,
        "workers": args.workers,
        "steps": args.steps,
        "batch": args.batch,
        "lr": args.lr,
    }
    return {"method": expression, "seed": seed, **result, "seconds": time.perf_counter() - start, **setting}


def table(rows: list[dict]) -> str:
    """Mean loss and spread of each method, and the share of the gap from local_sgd to ddp that it closes."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["method"], []).append(row["loss"])
    mean = {method: statistics.mean(values) for method, values in losses.items()}
    top, low = mean.get(f"local_sgd(every={H})"), mean.get("ddp()")
    lines = ["| method | loss | ± | seeds | gap closed | MB per worker |", "|---|---|---|---|---|---|"]
    for method, loss in sorted(mean.items(), key=lambda item: item[1]):
        spread = statistics.stdev(losses[method]) if len(losses[method]) > 1 else 0.0
        closed = f"{(top - loss) / (top - low):.0%}" if top and low else ""
        sent = statistics.mean(row["megabytes"] for row in rows if row["method"] == method)
        lines.append(
            f"| `{method}` | {loss:.4f} | {spread:.4f} | {len(losses[method])} | {closed} | {sent:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--data", help="a text file; the standard library's source if not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    )
    for seed in range(args.first, args.seeds):
        for method in args.methods:
            if not any(row["method"] == method and row["seed"] == seed for row in rows):
                rows.append(run(method, seed, args))
                with args.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(
                    f"seed {seed} {method}: {rows[-1]['loss']:.4f} in {rows[-1]['seconds']:.0f} s", flush=True
                )
    print(table(rows))


if __name__ == "__main__":
    main()
