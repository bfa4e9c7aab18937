"""The memory of every method in copies of the model, measured: 10.8 M parameters, two workers.

    python benchmarks/memory/run.py

Each method runs in processes of its own. `kept` is the resident memory after a few rounds, `peak` the highest
during them, both beyond those of the bare loop with the same model, gradients and optimizer (plain SGD).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import offbeat
from offbeat.tasks import bytes_task

METHODS = [
    "bare",
    "ddp()",
    "local_sgd(every=2)",
    "local_sgd(every=2, delay=1)",
    "post_local_sgd(switch=2, every=2)",
    "hierarchical(nodes=1, inner=1, outer=2)",
    "qsr(alpha=0.0, base=2)",
    "adaptive(start=2, sample=2)",
    "adacomm(start=2, interval=2)",
    "dasgd(every=2, delay=1)",
    "cocod(every=2, delay=1)",
    "slowmo(every=2)",
    "diloco(every=2)",
    "streaming_diloco(every=4, fragments=4, reduce=Mean())",
    "eager_diloco(every=2)",
    "palsgd(every=2)",
    "overlap_local_sgd(every=2)",
    "noloco(every=2)",
    "wagma(every=4)",
    "eager_sgd(every=4)",
    "a2sgd(every=2)",
    "def_sgd(every=2)",
    "sparse_loco(every=2)",
    "ssd_sgd(every=2, warmup=2)",
    "od_sgd(warmup=2)",
    "local_sgd(every=2, reduce=Quantized(8))",
    "diloco(every=2, reduce=ErrorFeedback(Quantized(4)))",
]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def worker(expression: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = bytes_task("large").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    sync = None if expression == "bare" else offbeat.method(expression)(model, optimizer)
    peak = 0
    for _ in range(9):
        if sync is None:
            optimizer.step()
        else:
            sync.observe(1.0)
            sync.step()
        peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if dist.get_rank() == 0:
        print(json.dumps({"kept": resident() / size, "peak": peak / size}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(expression: str) -> dict[str, float]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, expression]
    # Freed tensors go back to the system at once, instead of waiting in the heap to be used again.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, env=env)
    output = run.stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    results = {expression: run(expression) for expression in METHODS}
    bare = results.pop("bare")
    print("| method | kept | peak |\n|---|---|---|")
    for expression, found in results.items():
        print(f"| `{expression}` | {found['kept'] - bare['kept']:.1f} | {found['peak'] - bare['peak']:.1f} |")


if __name__ == "__main__":
    worker(sys.argv[1]) if len(sys.argv) > 1 else main()
