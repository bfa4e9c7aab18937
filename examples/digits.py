"""Train one small network on four workers by several methods, and compare what they cost.

    torchrun --standalone --nproc-per-node 4 examples/digits.py
    torchrun --standalone --nproc-per-node 4 examples/digits.py --steps 200 "ddp()" "local_sgd(every=32)"

Every method sees the same data, seed and number of steps. Needs the extra `cli`. Without torchrun: a world of
one.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import offbeat

torch.set_num_threads(1)
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

parser = argparse.ArgumentParser(description="Compare methods on scikit-learn's digits.")
parser.add_argument("methods", nargs="*", help='expressions such as "local_sgd(every=8)"')
parser.add_argument("--steps", type=int, default=400, help="local steps of each worker (default: 400)")
args = parser.parse_args()
steps = args.steps
expressions = args.methods or [
    "ddp()",
    "local_sgd(every=8)",
    "local_sgd(every=8, delay=4)",
    f"post_local_sgd(switch={steps // 8}, every=8)",
    f"hierarchical(nodes={2 if workers % 2 == 0 else 1}, inner=1, outer=8)",
    f"qsr(alpha=0.06, base=4, total={steps})",
]

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
held_out = slice(1437, None)
mine = torch.arange(1437)[rank::workers]  # every worker has its own part of the data


def build(expression: str) -> tuple[nn.Module, torch.optim.Optimizer, offbeat.Synchronizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, offbeat.method(expression)(model, optimizer)


def run(expression: str, progress: Progress) -> dict[str, float]:
    """Train, and say how well and at what price."""
    model, optimizer, sync = build(expression)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw = torch.Generator().manual_seed(rank)
    bar = progress.add_task(expression, total=steps, loss=float("nan"))
    start = time.perf_counter()
    for _ in range(steps):
        batch = mine[torch.randint(len(mine), (16,), generator=draw)]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        sync.step()
        optimizer.zero_grad()
        decay.step()
        progress.update(bar, advance=1, loss=loss.item())
    sync.finish()  # every worker has the same weights now
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
    total = sync.totals
    return {
        "accuracy": right,
        "rounds": total.rounds,
        "sent": total.bytes_sent / 1e6,
        "waited": total.seconds_waited,
        "seconds": seconds,
    }


try:
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least 1 is needed.")
    for expression in expressions:
        build(expression)
except (TypeError, ValueError) as error:
    if rank == 0:
        print(error, file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()  # the first to leave would have torchrun end the others
    sys.exit(2)

console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 110)
looks = "{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}")
with Progress(*looks, console=console, disable=rank != 0) as progress:
    results = {expression: run(expression, progress) for expression in expressions}

table = Table(title=f"digits, workers: {workers}, steps: {steps}; traffic and times of rank 0")
table.add_column("method", overflow="fold")
for heading in ("accuracy", "rounds", "MB sent", "s waited", "s in all", "traffic/ddp"):
    table.add_column(heading, justify="right")
most = next((r["sent"] for expression, r in results.items() if expression.startswith("ddp")), 0.0)
for expression, r in results.items():
    share = f"{r['sent'] / most:.3f}" if most else "-"
    costs = f"{r['rounds']}", f"{r['sent']:.1f}", f"{r['waited']:.2f}", f"{r['seconds']:.2f}", share
    table.add_row(expression, f"{r['accuracy']:.1%}", *costs)
console.print(table)
if dist.is_initialized():
    dist.destroy_process_group()
