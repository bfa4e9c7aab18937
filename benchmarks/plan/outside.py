"""Does the planner predict what somebody else measured, from the step and the link alone?

    python benchmarks/plan/outside.py

The runs are those of github.com/Adnan082/diloco-measured: four L40S, TCP shaped with `tc`, a model of
30 846 720 parameters in float32, torchft's DiLoCo and Local SGD. Published is the share of time in which a
worker computes, the median of three runs for DiLoCo and one run for Local SGD. Nothing is fitted: the step of
26.5 ms is about the median `compute_time_ms` of cu_grid-diloco-30m-h8-bw1g-r0. No latency is given.
"""

from __future__ import annotations

import statistics

from offbeat import Constant, Network
from offbeat.plan import Cluster, Job, predict

STEP, PARAMETERS = 0.0265, 30_846_720
LINKS = {"50 Mbit/s": 50e6, "200 Mbit/s": 200e6, "1 Gbit/s": 1e9, "5 Gbit/s": 5e9}
PUBLISHED = {  # percent of the time, by method and period, in the order of the links
    ("diloco", 1): (0.07, 0.32, 1.74, 7.76),
    ("diloco", 8): (0.55, 2.48, 12.35, 40.24),
    ("diloco", 32): (2.41, 10.01, 36.01, 68.10),
    ("diloco", 128): (11.55, 36.09, 71.52, 87.00),
    ("local_sgd", 1): (0.07, 0.31, 1.69, 7.61),
    ("local_sgd", 8): (0.52, 2.40, 11.83, 38.65),
    ("local_sgd", 32): (2.30, 9.36, 33.65, 62.57),
    ("local_sgd", 128): (10.81, 33.46, 65.56, 80.72),
}


def busy(method: str, every: int, bits: float) -> float:
    """The share of the time in which a worker computes, in percent, without the start and the end."""
    cluster = Cluster(4, Constant(STEP), Network(bandwidth=bits / 8, reduce="ring"))
    short, long = (
        predict(f"{method}(every={every})", Job(rounds * every, PARAMETERS), cluster).seconds
        for rounds in (10, 20)
    )
    return 100 * 10 * every * STEP / (long - short)


def main() -> None:
    errors: dict[str, list[float]] = {"diloco": [], "local_sgd": []}
    print("| method | " + " | ".join(LINKS) + " |\n|---" + "|---" * len(LINKS) + "|")
    for (method, every), published in PUBLISHED.items():
        cells = []
        for bits, found in zip(LINKS.values(), published, strict=True):
            told = busy(method, every, bits)
            errors[method].append(told / found - 1)
            cells.append(f"{found:.2f} %, {told:.2f} % ({errors[method][-1]:+.0%})")
        print(f"| `{method}(every={every})` | " + " | ".join(cells) + " |")
    for method, found in errors.items():
        sizes = sorted(map(abs, found))
        print(f"\n{method}: median error {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}")


if __name__ == "__main__":
    main()
