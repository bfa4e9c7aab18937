"""How much faster is each framework's example on a slow link than the same script with DDP, at equal steps?

    sudo python benchmarks/frameworks/run.py --rate 50mbit

Two hosts with shaped links, real TCP. `seconds` are of the training loop alone, which each script prints in
its last line, and the mean over the runs; imports and the start are left out. Prints a markdown table and
appends every run to results.jsonl beside this file.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

from offbeat.lab import Lab

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results.jsonl"

# The framework, its script, the method, and the options that give DDP and the method equal work.
SCRIPTS = [
    (
        "transformers",
        "examples/transformers_trainer.py",
        "diloco(every=32)",
        ["--steps", "64", "--width", "256"],
    ),
    (
        "accelerate",
        "examples/accelerate_local_sgd.py",
        "local_sgd(every=16)",
        ["--updates", "64", "--width", "384"],
    ),
    ("lightning", "examples/lightning_strategy.py", "diloco(every=16)", ["--steps", "64", "--width", "768"]),
]


def train(lab: Lab, script: str, method: str, options: list[str]) -> tuple[float, float]:
    """Seconds of the slowest host, and the megabytes that the kernel of the busiest one sent."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    runs = lab.run([sys.executable, str(ROOT / script), method, *options], env=environment, timeout=3600)
    for run in runs:
        if run.returncode:
            raise SystemExit(f"{script} {method}: rank {run.rank} failed:\n{run.stderr}")
    (seconds,) = re.findall(r"([\d.]+) s\b", runs[0].stdout.splitlines()[-1])
    return float(seconds), max(run.sent for run in runs) / 1e6


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| framework | method | seconds | MB sent | with DDP (s) | MB sent | faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for framework, _, method, _ in SCRIPTS:
        means = []
        for kind in (method, "ddp"):
            runs = [row for row in rows if (row["framework"], row["method"]) == (framework, kind)]
            for key in ("seconds", "megabytes") if runs else ():
                means.append(statistics.mean(float(str(row[key])) for row in runs))
        if means:
            cells = " | ".join(f"{mean:.1f}" for mean in means)
            lines.append(f"| {framework} | `{method}` | {cells} | {means[2] / means[0]:.1f}× |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of each script's own number, for a trial")
    parser.add_argument("--only", help="one framework")
    args = parser.parse_args()
    rows = []
    for framework, script, method, options in SCRIPTS:
        if args.only not in (None, framework):
            continue
        options = [str(args.steps or options[1]) if i == 1 else word for i, word in enumerate(options)]
        for kind in args.runs * [method, "ddp"]:
            with Lab(2, rate=args.rate) as lab:
                seconds, megabytes = train(lab, script, kind, options)
            row = {"framework": framework, "version": version(framework), "rate": args.rate, "method": kind}
            rows.append({**row, "options": options, "seconds": seconds, "megabytes": megabytes})
            print(json.dumps(rows[-1]), flush=True)
    if args.steps is None:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))


if __name__ == "__main__":
    main()
