"""How much loss codes cost: the same training with and without them, seed by seed, in simulation.

    python benchmarks/codes/study.py --data tinyshakespeare.txt
    python benchmarks/codes/study.py                               # only prints the table

Four workers. A run with a code starts from the same weights and sees the same batches as the run without one.
Appends one line per run to study.jsonl beside this file, skips what is there already, and prints the table:
the mean difference to the exact mean over the seeds, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import offbeat
from offbeat.tasks import Task, bytes_task, digits_task
from offbeat.tasks import bytes as text

RESULTS = Path(__file__).parent / "study.jsonl"
WORKERS = 4
WINDOWS = 1024  # held-out windows of text; 64 would add noise
SETTINGS = {  # task, optimizer and steps
    "digits, SGD": ("digits", "SGD", 200),
    "bytes, AdamW": ("bytes", "AdamW", 200),
}
FEEDBACK = [f"ErrorFeedback(Quantized({bits}))" for bits in (4, 3, 2)]
UNLIMITED = [f"ErrorFeedback(Quantized({bits}), limit=1e9)" for bits in (4, 3, 2)]
HALF = [f"ErrorFeedback(Quantized({bits}), decay=0.5, limit=1e9)" for bits in (4, 3, 2)]
CODES = ["Mean()", "Mean('bfloat16')", *FEEDBACK, *UNLIMITED, *HALF, "Quantized(4)", "Quantized(2)"]
METHODS = [
    "ddp(reduce={})",
    "local_sgd(every=4, reduce={})",
    "diloco(every=16, lr=1.0, momentum=0.3, reduce={})",
]
# What is run: a setting, a method and its codes. What answers most comes first.
PLAN = [
    ("digits, SGD", METHODS[0], [CODES[0], *FEEDBACK]),
    ("bytes, AdamW", METHODS[0], CODES[:3]),
    ("bytes, AdamW", METHODS[0], FEEDBACK[1:]),
    ("digits, SGD", METHODS[1], [CODES[0], *FEEDBACK]),
    ("bytes, AdamW", METHODS[1], [CODES[0], *FEEDBACK]),
    ("bytes, AdamW", METHODS[2], [CODES[0], FEEDBACK[0]]),
    ("digits, SGD", METHODS[0], CODES[5:]),
    ("bytes, AdamW", METHODS[0], UNLIMITED),
]


def rate(step: int, steps: int, warmup: int = 40) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def build_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def worker(comm: offbeat.Communicator, task: Task, expression: str, seed: int, name: str, steps: int) -> dict:
    model = task.model()
    optimizer = build_optimizer(model, name)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    batches = task.batches(comm.rank, comm.size, task.batch_size, seed)
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    for _ in range(steps):
        task.loss(model, next(batches)).backward()
        sync.step(lambda: (nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step()))
        optimizer.zero_grad()
        scheduler.step()
    sent = sync.totals.bytes_sent
    sync.finish()
    return {"loss": task.evaluate(model) if comm.rank == 0 else 0.0, "megabytes": sent / 1e6}


def run(setting: str, expression: str, seed: int, data: str | None) -> dict:
    kind, optimizer, steps = SETTINGS[setting]
    task = (
        digits_task(seed=seed) if kind == "digits" else bytes_task("tiny", data=data, context=32, seed=seed)
    )
    torch.manual_seed(seed)
    start = time.perf_counter()
    result = offbeat.simulate(lambda comm: worker(comm, task, expression, seed, optimizer, steps), WORKERS)[0]
    row = {"setting": setting, "method": expression, "seed": seed, "steps": steps, **result}
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def table(rows: list[dict]) -> str:
    """One line per setting, method and code, with the exact mean first."""
    found = {(row["setting"], row["method"], row["seed"]): row for row in rows}
    lines = ["| task | method | loss | difference | seeds | bytes ÷ fp32 |", "|---|---|---|---|---|---|"]
    for setting, method, code in cells():
        exact, coded = method.format(CODES[0]), method.format(code)
        seeds = [s for t, m, s in found if (t, m) == (setting, coded) and (setting, exact, s) in found]
        pairs = [(found[setting, coded, s], found[setting, exact, s]) for s in seeds]
        if pairs:
            loss = statistics.mean(row["loss"] for row, _ in pairs)
            share = statistics.mean(row["megabytes"] / base["megabytes"] for row, base in pairs)
            shown = "" if code == CODES[0] else difference(pairs)
            lines.append(f"| {setting} | `{coded}` | {loss:.4f} | {shown} | {len(pairs)} | {share:.3f} |")
    return "\n".join(lines)


def cells() -> list[tuple[str, str, str]]:
    """Setting, method and code of each line of the table."""
    planned = [(setting, method, code) for setting, method, codes in PLAN for code in codes]
    order: list[Callable[[tuple[str, str, str]], int]] = [
        lambda cell: list(SETTINGS).index(cell[0]),
        lambda cell: METHODS.index(cell[1]),
        lambda cell: CODES.index(cell[2]),
    ]
    return sorted(planned, key=lambda cell: [place(cell) for place in order])


def difference(pairs: list[tuple[dict, dict]]) -> str:
    """The mean of (coded − exact) ÷ exact in percent, and its standard error."""
    shares = [100 * (row["loss"] / base["loss"] - 1) for row, base in pairs]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return f"{statistics.mean(shares):+.2f} ± {error:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a text file; nothing is run without it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the methods that contain this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text.EVALUATED = WINDOWS
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["setting"], row["method"], row["seed"]) for row in rows}
    todo = [
        (setting, method.format(code), seed)
        for setting, method, codes in PLAN
        for seed in range(args.seeds)
        for code in codes
    ]
    for setting, expression, seed in todo if args.data else []:
        if (setting, expression, seed) not in done and args.only in expression:
            rows.append(run(setting, expression, seed, args.data))
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
