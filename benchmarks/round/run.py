"""One full model average ÷ one raw all-reduce of the same bytes: a GPT and a ResNet, 4 workers.

    python benchmarks/round/run.py             # loopback; as root also links of 1 Gbit/s and 200 Mbit/s
    python benchmarks/round/run.py 10 ResNet   # so many repetitions, and one model

The GPT has 10.8 M parameters in 78 tensors; the ResNet has 11.2 M in 62, and 60 buffers in 20 BatchNorms.
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
COLUMNS = (
    "copies",
    "copy, reduce, copy",
    "**offbeat**",
    "reduce, scale",
    "**offbeat, flattened**",
    "torch averager",
    "**offbeat, buffers follow**",
)


def loopback(model: str, repetitions: int) -> str:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        WORKER,
        model,
        str(repetitions),
    ]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def shaped(rate: str, model: str, repetitions: int) -> str:
    with Lab(4, rate=rate) as lab:
        return lab.run([sys.executable, WORKER, model, str(repetitions)], timeout=900)[0].stdout


def show(model: str, link: str, output: str) -> None:
    result = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    cells = [f"{result[name][1]:.3f}" if name in result else "" for name in COLUMNS]
    print(f"| {model} | {link} | {1000 * result['raw'][0]:.0f} ms | {' | '.join(cells)} |", flush=True)


def main() -> None:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}, 4 workers\n")
    print("All but the first column of numbers are ratios to raw.\n")
    print(f"| model | link | raw | {' | '.join(COLUMNS)} |\n|---|---|---|{'---|' * len(COLUMNS)}")
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    models = sys.argv[2:] or ["GPT", "ResNet"]
    for model in models:
        show(model, "loopback", loopback(model, repetitions))
        if unavailable() is None:
            show(model, "1 Gbit/s", shaped("1gbit", model, repetitions // 2))
            show(model, "200 Mbit/s", shaped("200mbit", model, repetitions // 4))
    if reason := unavailable():
        print(f"\nShaped links were left out: {reason}")


if __name__ == "__main__":
    main()
