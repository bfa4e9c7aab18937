"""Is the wall-clock what the planner says? On links of 50, 100 and 200 Mbit/s.

    sudo python benchmarks/plan/run.py

Four workers, 0.84 M parameters, in a lab of shaped links. They first measure their steps and their link, as
`offbeat plan --measure` does; from these figures alone each method is predicted, and then it runs. What is
compared is the time from building the synchronizer to the end of finish(). `late`: each step of each worker
is 0.4 s longer with a probability of 10 %.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from offbeat import Network, Recorded
from offbeat.lab import Lab, unavailable
from offbeat.plan import Cluster, Job, predict

HERE = Path(__file__).parent
RATES = ("50mbit", "100mbit", "200mbit")
RUNS = [
    ("ddp()", 12, False),
    ("local_sgd(every=8)", 32, False),
    ("diloco(every=16)", 32, False),
    ("cocod(every=8, delay=4)", 32, False),
    ("ssd_sgd(every=4, warmup=4)", 20, False),
    ("wagma(every=8)", 16, True),
    ("local_sgd(every=1)", 8, True),
]


def rows(rate: str, told: dict) -> list[dict]:
    network = Network(**{**told["network"], "levels": ()})
    found = []
    for expression, steps, late, measured in told["runs"]:
        compute = Recorded(tuple(map(tuple, told["rows"][str(late)])))
        job = Job(steps, told["parameters"], optimizer="momentum", layers=4)
        predicted = predict(expression, job, Cluster(4, compute, network))
        found.append(
            {
                "rate": rate,
                "method": expression,
                "late": late,
                "steps": steps,
                "predicted": round(predicted.seconds, 3),
                "spread": round(predicted.spread, 3),
                "measured": round(measured, 3),
                "error": round(predicted.seconds / measured - 1, 4),
            }
        )
    return found


def main() -> None:
    if reason := unavailable():
        raise SystemExit(reason)
    lines = []
    print("| link | method | late | steps | predicted (s) | measured (s) | error |\n" + "|---" * 7 + "|")
    for rate in sys.argv[1:] or RATES:
        with Lab(4, rate=rate) as lab:
            runs = lab.run([sys.executable, str(HERE / "worker.py"), json.dumps(RUNS)], timeout=200)
        if runs[0].returncode:
            raise SystemExit(runs[0].stderr)
        told = json.loads(next(line for line in runs[0].stdout.splitlines() if line.startswith("{")))
        lines.append(
            {"rate": rate, **{key: told[key] for key in ("rows", "parameters", "network", "points")}}
        )
        for row in rows(rate, told):
            lines.append(row)
            figures = (
                f"{row['predicted']:.2f} ± {row['spread']:.2f} | {row['measured']:.2f} | {row['error']:+.1%}"
            )
            late = "yes" if row["late"] else ""
            print(f"| {rate} | `{row['method']}` | {late} | {row['steps']} | {figures} |", flush=True)
    (HERE / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
