"""Is a step as long as its message, on slow links, and are the bytes those of the formula?

    sudo python benchmarks/pushpull/run.py 100mbit 50mbit

1.8 M parameters, 4 workers. Contenders take turns in blocks of 20 steps, each from an idle link until all has
landed; two steps come before the first block. The ceiling of a contender is the longer of a step's
computation and its payload at the link's nominal rate, with the headers of its packets and without them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from offbeat.comm.throttled import FRAMING
from offbeat.lab import Lab, Run, parse_rate, unavailable

WORKER = str(Path(__file__).parent / "worker.py")
WORKERS, PARAMETERS, ROUNDS = 4, 1_853_952, 2
SHARES = {  # copies of the model's (K − 1)/K that a step sends
    "alone": 0.0,
    "DistributedDataParallel": 2.0,
    "ddp()": 2.0,
    "ssd_sgd(every=5, warmup=0)": 1 + 1 / 5,
    "ssd_sgd(every=10, warmup=0)": 1 + 1 / 10,
}


def rows(rate: str, runs: tuple[Run, ...]) -> list[str]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for line in run.stdout.splitlines():
            block = json.loads(line)
            for name in ("seconds", "counted", "reported"):
                found[block["contender"]][name].append(block[name])
    median = {name: {k: statistics.median(v) for k, v in values.items()} for name, values in found.items()}
    compute, baseline = median["alone"]["seconds"], median["ddp()"]["seconds"]
    lines = []
    for name, values in median.items():
        payload = SHARES[name] * 4 * PARAMETERS * (WORKERS - 1) / WORKERS
        bare, ceiling = (max(compute, payload * more * 8 / parse_rate(rate)) for more in (1.0, FRAMING))
        sizes = " | ".join(f"{size / 1e6:.3f}" for size in (payload, values["reported"], values["counted"]))
        reached = " | ".join(f"{limit / values['seconds']:.1%}" for limit in (ceiling, bare))
        speed = f"{values['seconds']:.3f} | {ceiling:.3f} | {reached}"
        lines.append(f"| {rate} | `{name}` | {speed} | {baseline / values['seconds']:.2f} | {sizes} |")
    return lines


def main() -> None:
    if reason := unavailable():
        raise SystemExit(reason)
    figures = "s per step | ceiling | reached | without headers | speed, ddp = 1 | MB | reported | counted"
    print(f"| link | contender | {figures} |\n{'|---' * 10}|")
    for rate in sys.argv[1:] or ["100mbit", "50mbit"]:
        with Lab(WORKERS, rate=rate) as lab:
            runs = lab.run([sys.executable, WORKER, str(ROUNDS), *SHARES], timeout=600)
        for run in runs:
            if run.returncode:
                raise SystemExit(run.stderr)
        print("\n".join(rows(rate, runs)), flush=True)


if __name__ == "__main__":
    main()
