"""One round with each code ÷ the round in float32: 10.8 M parameters, 78 tensors, 4 workers.

    python benchmarks/codes/run.py loopback
    sudo python benchmarks/codes/run.py 200mbit

Prints a table: milliseconds of one round, and its seconds and bytes as ratios to the first row.
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
CODES = [
    "Mean()",
    "Mean('bfloat16')",
    "Quantized(8)",
    "Quantized(4)",
    "ErrorFeedback(Quantized(4))",
    "ErrorFeedback(Quantized(2))",
    "ErrorFeedback(TopK(64))",
    "ErrorFeedback(RandomBlock(64))",
    "ErrorFeedback(LowRank(4))",
]
METHODS = [f"diloco(every=1, drift=False, reduce={code})" for code in CODES]
METHODS.append("sparse_loco(every=1, drift=False)")


def loopback(repetitions: int) -> str:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", WORKER]
    full = [sys.executable, *command, str(repetitions), *METHODS]
    return subprocess.run(full, capture_output=True, text=True, check=True).stdout


def shaped(rate: str, repetitions: int) -> str:
    with Lab(4, rate=rate) as lab:
        return lab.run([sys.executable, WORKER, str(repetitions), *METHODS], timeout=900)[0].stdout


def show(link: str, output: str) -> None:
    result = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    seconds, sent = result[METHODS[0]]
    print(f"\n| {link} | ms | ÷ fp32 | bytes ÷ fp32 |\n|---|---|---|---|")
    for method, (took, gave) in result.items():
        print(f"| `{method}` | {1000 * took:.0f} | {took / seconds:.3f} | {gave / sent:.4f} |", flush=True)


def main() -> None:
    link = sys.argv[1]
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 12 if link == "loopback" else 4
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}, 4 workers")
    if link == "loopback":
        show(link, loopback(repetitions))
    elif reason := unavailable():
        raise SystemExit(reason)
    else:
        show(link, shaped(link, repetitions))


if __name__ == "__main__":
    main()
