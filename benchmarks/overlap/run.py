"""Does a delay hide communication, and are the bytes reported those on the wire?

    sudo python benchmarks/overlap/run.py

1.8 M parameters, 4 workers, links of 50 Mbit/s. For each method, after a first period: the seconds of a step,
the time a round flies, how much of that the worker stood still for, and the bytes reported against those the
kernel counted.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from offbeat.lab import Lab, Run, unavailable

WORKER = str(Path(__file__).parent / "worker.py")
METHODS = [
    "ddp()",
    "local_sgd(every=16)",
    "cocod(every=16, delay=8)",
    "cocod(every=16, delay=14)",
    "dasgd(every=16, delay=14)",
    "diloco(every=16)",
    "streaming_diloco(every=16, fragments=4, delay=4, reduce=Mean())",
    "eager_diloco(every=16)",
    "overlap_local_sgd(every=16)",
    "noloco(every=16)",
]
STEPS = 64


def row(method: str, runs: tuple[Run, ...]) -> str:
    lines = [[json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")] for run in runs]
    mean = {name: statistics.mean(first[name] for first, _ in lines) for name in lines[0][0]}
    exposed = mean["waited"] / mean["flown"] if mean["flown"] else 0.0
    reported = sum(last["sent"] for _, last in lines)
    counted = sum(run.sent for run in runs)
    flight = mean["flown"] / mean["rounds"] if mean["rounds"] else 0.0
    waited = mean["waited"] / mean["seconds"]
    times = f"{mean['step']:.3f} | {flight:.2f} | {exposed:.1%} | {waited:.1%}"
    return f"| `{method}` | {times} | {reported / 4e6:.2f} | {counted / 4e6:.2f} | {reported / counted:.3f} |"


def main() -> None:
    if reason := unavailable():
        raise SystemExit(reason)
    print("| method | step (s) | flight (s) | exposed | of the run | MB reported | MB counted | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    with Lab(4, rate="50mbit") as lab:
        for method in sys.argv[1:] or METHODS:
            steps = STEPS // 8 if method == "ddp()" else STEPS
            runs = lab.run([sys.executable, WORKER, method, str(steps)], timeout=1200)
            print(row(method, runs), flush=True)


if __name__ == "__main__":
    main()
