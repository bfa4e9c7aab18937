"""One full model average ÷ one raw all-reduce of the same bytes: 10.8 M parameters, 78 tensors, 4 workers.

    python benchmarks/round/run.py             # loopback; as root also links of 1 Gbit/s and 200 Mbit/s

Prints a table. `copy, reduce, copy` is the least a round costs where weights are copied into a vector and
back, `reduce, scale` the least it costs where they live in it (`offbeat.flatten`).
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

from offbeat.lab import Lab, unavailable

WORKER = str(Path(__file__).parent / "worker.py")


def loopback(repetitions: int) -> str:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        WORKER,
        str(repetitions),
    ]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def shaped(rate: str, repetitions: int) -> str:
    with Lab(4, rate=rate) as lab:
        return lab.run([sys.executable, WORKER, str(repetitions)], timeout=900)[0].stdout


def show(link: str, output: str, *, head: bool = False) -> None:
    result = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    if head:
        print(f"| link | {' | '.join(result)} |\n|---|{'---|' * len(result)}")
    cells = [f"{1000 * result['raw'][0]:.0f} ms", *(f"{ratio:.3f}" for _, ratio in list(result.values())[1:])]
    print(f"| {link} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}, 4 workers\n")
    print("All but the first column of numbers are ratios to raw.\n")
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    show("loopback", loopback(repetitions), head=True)
    if reason := unavailable():
        print(f"\nShaped links were left out: {reason}")
        return
    show("1 Gbit/s", shaped("1gbit", repetitions // 2))
    show("200 Mbit/s", shaped("200mbit", repetitions // 4))


if __name__ == "__main__":
    main()
