"""Validation loss of every method at equal tokens: a byte-level GPT, four workers, in simulation.

    python benchmarks/quality/run.py --data tinyshakespeare.txt            # three seeds of each method below
    python benchmarks/quality/run.py --data tinyshakespeare.txt --seeds 1 'diloco(every=16, lr=0.5)'
    python benchmarks/quality/run.py --data tinyshakespeare.txt --seeds 1 --lengths    # 100, 400, 1 600 steps
    python benchmarks/quality/run.py --data tinyshakespeare.txt --muon --steps 100     # with Muon inside
    python benchmarks/quality/run.py --data tinyshakespeare.txt --defaults             # how some were chosen

Appends one line per run to results.jsonl beside this file, with --muon to muon.jsonl and with --defaults
to defaults.jsonl, skips what is there already, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable
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
    f"palsgd(every={H})",
    f"noloco(every={H})",
    f"desloc(every={H})",
    f"snoo(every={H})",
    f"lookahead_diloco(every={H})",
    f"sparse_loco(every={H})",
]
PAPERS = [  # the settings of the papers, and others beside the defaults
    f"overlap_local_sgd(every={H}, pull=0.6, momentum=0.7)",
    f"sparse_loco(every={H}, lr=1.0)",
    f"sparse_loco(every={H}, lr=2.0)",
    f"slowmo(every={H}, ramp=0)",
    f"diloco(every={H}, ramp=0)",
    f"streaming_diloco(every={H}, fragments=3, delay=4, ramp=0, reduce=Mean())",
    f"eager_diloco(every={H}, ramp=0, share=0.0)",
    f"palsgd(every={H}, ramp=0)",
    f"noloco(every={H}, ramp=0)",
    f"diloco(every={H}, lr=1.0, momentum=0.3, ramp=0)",
    f"diloco(every={H}, lr=1.0, momentum=0.3, ramp=0, warmup=100)",
    f"slowmo(every={H}, momentum=0.3, ramp=0, warmup=100)",
]
MUON = ["ddp()", f"diloco(every={H})", f"local_sgd(every={H})", f"diloco(every={H}, lr=0.7, momentum=0.5)"]
DEFAULTS = [  # from which defaults were chosen, on other seeds than those of the table
    f"eager_diloco(every={H}, lr=0.4, momentum=0.5, share=0.0)",
    *[f"eager_diloco(every={H}, share={share})" for share in (0.5, 0.75, 1.0)],
    *[f"overlap_local_sgd(every={H}, pull=0.4, momentum={momentum})" for momentum in (0.0, 0.4, 0.7, 0.95)],
    f"overlap_local_sgd(every={H}, pull=0.15)",
    f"overlap_local_sgd(every={H})",
    f"overlap_local_sgd(every={H}, pull=0.25, momentum=0.4)",
    *[f"sparse_loco(every={H}, lr={lr})" for lr in (1.0, 2.0, 2.5, 3.0)],
    *[f"sparse_loco(every={H}, decay={decay}, lr=1.0)" for decay in (0.5, 0.8, 1.0)],
    *[f"sparse_loco(every={H}, decay={decay}, lr=2.0)" for decay in (0.9, 1.0)],
    *[f"sparse_loco(every={H}, ratio={ratio}, lr=1.0)" for ratio in (8, 16, 32)],
    f"sparse_loco(every={H})",
    f"local_sgd(every={H})",
]
RATE = 3e-3
LENGTHS = (100, 400, 1600)
LONG = [METHODS[1], *METHODS[9:16], METHODS[-1], *PAPERS[:9]]  # what is run for all lengths
RESULTS = Path(__file__).parent / "results.jsonl"


def rate(step: int, steps: int, warmup: int = 40) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def adamw(parameters: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def muon(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings, head and vectors, with one rate for both."""
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    others = [p for p in model.parameters() if not any(p is q for q in inside)]
    matrices = torch.optim.Muon(inside, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [matrices, adamw(others, lr)]


def worker(
    comm: offbeat.Communicator, task: Task, expression: str, seed: int, args: argparse.Namespace
) -> dict:
    model = task.model()
    optimizers = muon(model, args.lr) if args.muon else [adamw(model.parameters(), args.lr)]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
        for optimizer in optimizers
    ]
    batches = task.batches(comm.rank, comm.size, args.batch, seed)
    sync = offbeat.method(expression)(model, optimizers, group=comm)

    def local() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(args.steps):
        loss = task.loss(model, next(batches))
        loss.backward()
        sync.observe(loss)
        sync.step(local)
        model.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    with sync.averaged():
        shown = task.evaluate(model) if comm.rank == 0 else 0.0
    totals = sync.totals
    sync.finish()
    last = task.evaluate(model) if comm.rank == 0 else 0.0
    return {"loss": last, "averaged": shown, "rounds": totals.rounds, "megabytes": totals.bytes_sent / 1e6}


def setting(args: argparse.Namespace) -> dict:
    names = ("size", "workers", "steps", "batch", "lr", "context")
    return {name: getattr(args, name) for name in names}


def run(expression: str, seed: int, args: argparse.Namespace) -> dict:
    torch.manual_seed(seed)
    task = bytes_task(args.size, data=args.data, context=args.context, seed=seed)
    start = time.perf_counter()
    result = offbeat.simulate(lambda comm: worker(comm, task, expression, seed, args), args.workers)[0]
    seconds = time.perf_counter() - start
    return {"method": expression, "seed": seed, **result, "seconds": seconds, **setting(args)}


def table(rows: list[dict]) -> str:
    """Mean loss and spread of each method, and the share of the gap from local_sgd to ddp that it closes."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["method"], []).append(row["loss"])
    mean = {method: statistics.mean(values) for method, values in losses.items()}
    top, low = mean.get(f"local_sgd(every={H})"), mean.get("ddp()")
    lines = ["| method | loss | ± | seeds | gap closed | MB per worker |", "|---|---|---|---|---|---|"]
    for method, loss in sorted(mean.items(), key=lambda item: item[1]):
        spread = f"{statistics.stdev(losses[method]):.4f}" if len(losses[method]) > 1 else ""
        closed = f"{(top - loss) / (top - low):.0%}" if top and low else ""
        sent = statistics.mean(row["megabytes"] for row in rows if row["method"] == method)
        lines.append(
            f"| `{method}` | {loss:.4f} | {spread} | {len(losses[method])} | {closed} | {sent:.1f} |"
        )
    return "\n".join(lines)


def lengths(rows: list[dict]) -> str:
    """The loss of seed 0 of each method after 100, 400 and 1 600 steps, and relative to local_sgd."""
    usual = [row for row in rows if (row["seed"], row["lr"]) == (0, RATE)]
    loss = {(row["method"], row["steps"]): row["loss"] for row in usual}
    lines = ["| method | " + " | ".join(f"{steps:,} steps".replace(",", " ") for steps in LENGTHS) + " |"]
    lines.append("|---" * (1 + len(LENGTHS)) + "|")
    for method in [method for method in LONG if any((method, n) in loss for n in LENGTHS if n != 400)]:
        cells = []
        for steps in LENGTHS:
            mine, base = (loss.get((name, steps), math.nan) for name in (method, LONG[0]))
            cells.append("" if math.isnan(mine) else f"{mine:.4f} ({mine / base - 1:+.1%})")
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--data", help="a text file; the standard library's source if not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--muon", action="store_true", help="Muon and AdamW inside, for MuLoCo")
    parser.add_argument("--defaults", action="store_true", help="settings to choose from, seeds 10 and 11")
    parser.add_argument("--context", type=int, help="bytes that the model sees, other than the usual 64")
    parser.add_argument("--lengths", action="store_true", help="100, 400 and 1 600 steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=RATE)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.defaults:
        args.first, args.seeds = 10, 12
    name = "muon.jsonl" if args.muon else "defaults.jsonl" if args.defaults else RESULTS.name
    args.results = args.results or RESULTS.with_name(name)
    torch.set_num_threads(1)
    read = args.results.read_text().splitlines() if args.results.exists() else []
    rows = [json.loads(line) for line in read]
    lists = {"muon": MUON, "defaults": DEFAULTS, "lengths": LONG}
    usual = next((names for flag, names in lists.items() if getattr(args, flag)), METHODS + PAPERS)
    methods = args.methods or usual
    for steps in LENGTHS if args.lengths else (args.steps,):
        args.steps = steps
        for seed in range(args.first, args.seeds):
            for method in methods:
                key = {"method": method, "seed": seed, **setting(args)}
                if not any(key.items() <= {"context": None, **row}.items() for row in rows):
                    rows.append(run(method, seed, args))
                    with args.results.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    took = f"{rows[-1]['loss']:.4f} in {rows[-1]['seconds']:.0f} s"
                    print(f"{args.steps} steps, seed {seed}, {method}: {took}", flush=True)
    wanted = (args.steps, args.lr, args.context)
    same = [row for row in rows if (row["steps"], row["lr"], row.get("context")) == wanted]
    print(lengths(rows) if args.lengths else table(same))


if __name__ == "__main__":
    main()
