"""Workers that are delayed at random: what does it save not to wait for them, and what does it cost?

    python benchmarks/waitfree/run.py             # 4 and 8 workers, delayed and not; about ten minutes
    python benchmarks/waitfree/run.py 4 delayed   # one of them
    python benchmarks/waitfree/run.py 8 even 5    # in 5 turns instead of 12

Each step a random quarter of the workers sleeps for eight step times more. All contenders train the same
network on the same data, in turns of twenty steps with the same delays. `speed` is throughput ÷ that of
`ddp`; `limit` the same of workers whose messages take no time, from the very delays of the run. Appends to
results.jsonl and prints tables.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
CASES = [("4", "delayed"), ("8", "delayed"), ("4", "even"), ("8", "even")]


def measured(workers: str, *case: str) -> dict[str, Any]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
    run = subprocess.run(
        [sys.executable, *command, str(HERE / "worker.py"), *case],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return dict(json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{"))))


def loss_at(row: dict[str, Any], seconds: float) -> float:
    """The last loss that was reached by then."""
    reached = [loss for loss, at in zip(row["losses"], row["clock"], strict=True) if at <= seconds]
    return float(reached[-1]) if reached else float("nan")


def show(result: dict[str, Any]) -> None:
    rows = result["methods"]
    first = rows["ddp()"] if "ddp()" in rows else next(iter(rows.values()))
    fastest = min(row["clock"][-1] for row in rows.values())
    print(f"\n{result['workers']} workers, {result['case']}, {result['steps']} steps\n")
    print("| method | ms per step | waited | speed | limit | loss | ratio | at equal time | kept | late |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        ratio = statistics.median(a / b for a, b in zip(first["turns"], row["turns"], strict=True))
        cells = [
            f"{1000 * statistics.median(row['turns']) / result['turn']:.1f}",
            f"{1000 * row['waited']:.1f}",
            f"{ratio:.2f}",
            f"{result['limits'][name]:.2f}",
            f"{row['losses'][-1]:.4f}",
            f"{row['losses'][-1] / first['losses'][-1]:.3f}",
            f"{loss_at(row, fastest):.4f}",
            f"{row['kept']:.1%}",
            f"{row['late']:.1%}",
        ]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


def main() -> None:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}")
    cases = [tuple(sys.argv[1:])] if len(sys.argv) > 2 else CASES
    for case in cases:
        result = measured(*case)
        with (HERE / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        show(result)


if __name__ == "__main__":
    main()
