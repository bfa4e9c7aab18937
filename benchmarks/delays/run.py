"""What a delay costs: the validation loss against the same period without a delay, in simulation.

    python benchmarks/delays/run.py digits --optimizer sgd
    python benchmarks/delays/run.py digits --optimizer adamw
    python benchmarks/delays/run.py bytes --data tinyshakespeare.txt
    python benchmarks/delays/run.py images --data cifar10-jpeg.zip --cache pictures
    python benchmarks/delays/run.py table

Four workers. For each seed, all methods have the same weights, batches and learning rates. Each run is a line
of results.jsonl beside this file. Runs that are there already are not repeated.
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
from offbeat.tasks import Task, bytes_task, digits_task, images_task
from offbeat.tasks.task import adamw, heavy_ball

RESULTS = Path(__file__).parent / "results.jsonl"
SETTING = ("task", "size", "optimizer", "lr", "steps", "workers")
OPTIMIZERS = {"sgd": heavy_ball, "adamw": adamw}
RATES = {("digits", "adamw"): 3e-3, ("images", "adamw"): 3e-3}  # others: the task's own
STEPS = {"digits": 200, "bytes": 300, "images": 200}
USUAL = {"digits": "sgd", "bytes": "adamw", "images": "sgd"}
METHODS = [
    "local_sgd(every={H})",
    "local_sgd(every={H}, delay={d}, gain=1.0)",
    "local_sgd(every={H}, delay={d}, gain=0.75)",
    "local_sgd(every={H}, delay={d}, gain=0.5)",
    "local_sgd(every={H}, delay={d}, gain=0.25)",
    "dasgd(every={H}, delay={d})",
]


def rate(step: int, steps: int) -> float:
    """A linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warmup = steps // 10
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def worker(comm: offbeat.Communicator, task: Task, method: str, seed: int, args: argparse.Namespace) -> float:
    model = task.model()
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    batches = task.batches(comm.rank, comm.size, task.batch_size, seed)
    with offbeat.method(method)(model, optimizer, group=comm) as sync:
        for _ in range(args.steps):
            task.loss(model, next(batches)).backward()
            sync.step(lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step()))
            optimizer.zero_grad()
            scheduler.step()
    return task.evaluate(model) if comm.rank == 0 else 0.0


def build_task(args: argparse.Namespace, seed: int) -> Task:
    if args.task == "digits":
        return digits_task(args.size, seed=seed)
    if args.task == "bytes":
        return bytes_task(args.size, data=args.data, seed=seed)
    return images_task(args.size, data=args.data, cache=args.cache, seed=seed)


def run(method: str, seed: int, args: argparse.Namespace) -> dict:
    torch.manual_seed(seed)
    task = build_task(args, seed)
    start = time.perf_counter()
    loss = offbeat.simulate(lambda comm: worker(comm, task, method, seed, args), args.workers)[0]
    taken = {"loss": loss, "seconds": round(time.perf_counter() - start, 1)}
    return {"method": method, "seed": seed, **taken, **{name: getattr(args, name) for name in SETTING}}


def compare(found: dict[str, dict[int, float]], method: str, base: str) -> tuple[str, str]:
    """Return the mean loss, and how far it is above the base: the mean over seeds and its standard error."""
    losses, plain = found[method], found.get(base, {})
    ratios = [losses[seed] / plain[seed] - 1 for seed in losses if seed in plain]
    if method == base or not ratios:
        return f"{statistics.mean(losses.values()):.4f}", ""
    error = f" ± {statistics.stdev(ratios) / math.sqrt(len(ratios)):.2%}" if len(ratios) > 1 else ""
    return f"{statistics.mean(losses.values()):.4f}", f"{statistics.mean(ratios):+.2%}{error}"


def table(rows: list[dict]) -> str:
    """A line per method, sorted by loss within a setting; the same period without a delay comes first."""
    settings: dict[tuple, dict[str, dict[int, float]]] = {}
    for row in rows:
        key = (*(row[name] for name in SETTING), row["method"].split("every=")[1].split(",")[0].strip(")"))
        settings.setdefault(key, {}).setdefault(row["method"], {})[row["seed"]] = row["loss"]
    lines = ["| task | method | loss | against no delay | seeds |", "|---|---|---|---|---|"]
    for (task, size, optimizer, lr, *_, every), found in settings.items():
        base = f"local_sgd(every={every})"
        for method in sorted(
            found, key=lambda method: (method != base, statistics.mean(found[method].values()))
        ):
            loss, against = compare(found, method, base)
            name = f"{task} {size}, {optimizer} {lr:g}"
            lines.append(f"| {name} | `{method}` | {loss} | {against} | {len(found[method])} |")
    return "\n".join(lines)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=[*STEPS, "table"])
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS))
    parser.add_argument("--data", help="a text file or pictures")
    parser.add_argument("--cache", help="a folder for decoded pictures")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--delay", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    if args.task != "table":
        args.steps = args.steps or STEPS[args.task]
        args.optimizer = args.optimizer or USUAL[args.task]
        args.lr = args.lr or RATES.get((args.task, args.optimizer)) or build_task(args, 0).lr
        measure(args)
    print(table(read(args.results)))


def measure(args: argparse.Namespace) -> None:
    for seed in range(args.seeds):
        for pattern in args.methods:
            method = pattern.replace("{H}", str(args.every)).replace("{d}", str(args.delay))
            wanted = {"method": method, "seed": seed, **{name: getattr(args, name) for name in SETTING}}
            if not any(wanted.items() <= row.items() for row in read(args.results)):
                row = run(method, seed, args)
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"seed {seed} {method}: {row['loss']:.4f} in {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
