"""Workers of different speed, and links of different speed, in the lab.

    sudo python benchmarks/uneven/run.py straggler
    sudo python benchmarks/uneven/run.py budget
    python benchmarks/uneven/run.py table

`straggler`: four workers, of which one needs twice the time of a step. Samples per second, and the validation
loss after equal samples, for rounds after a number of steps and after a number of seconds. `budget`: the
period that `Budget(0.05)` finds, and the exposed share of the time, on links of 20, 100 and 1 000 Mbit/s and
on one that slows down from 1 000 to 50 in the middle of the run. Results are lines of results.jsonl.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from offbeat.lab import Lab, Run, unavailable

HERE = Path(__file__).parent
WORKER, RESULTS = str(HERE / "worker.py"), HERE / "results.jsonl"
STEP = 0.05  # seconds of a step
SAMPLES, SEEDS = 19_200, (0, 1, 2)
BUDGET, SETTLED = "diloco(every=Budget(0.05))", 4  # rounds in which a period may still change


def lines(run: Run) -> list[dict]:
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def keep(**row: object) -> None:
    row["load"] = round(os.getloadavg()[0], 1)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def straggler() -> None:
    methods = ["diloco(every=100)", "diloco(every=Seconds(5))"]
    with Lab(4, rate="1gbit") as lab:
        for seed in SEEDS:
            for method in methods:
                command = [sys.executable, WORKER, "straggle", method, str(STEP), str(SAMPLES), str(seed)]
                told = lines(lab.run(command, timeout=600)[0])
                keep(benchmark="straggler", method=method, seed=seed, rounds=told)


def at(rounds: list[dict], samples: int) -> float:
    """The loss after so many samples, on the line between the rounds around it."""
    for a, b in pairwise(rounds):
        if a["samples"] <= samples <= b["samples"]:
            share = (samples - a["samples"]) / (b["samples"] - a["samples"])
            return a["loss"] + share * (b["loss"] - a["loss"])
    raise ValueError(f"no round before or after {samples} samples")


def settle(told: list[list[dict]], after: float) -> tuple[float, float, float, int]:
    """Return the exposed share, that of all waiting, the mean period and the number of settled rounds."""
    mine = [rounds for rounds in zip(*told, strict=True) if rounds[0]["t"] > after][SETTLED:]
    seconds = sum(statistics.mean(row["seconds"] for row in rounds) for rounds in mine)
    exposed = sum(min(row["waited"] for row in rounds) for rounds in mine)
    waited = sum(statistics.mean(row["waited"] for row in rounds) for rounds in mine)
    return exposed / seconds, waited / seconds, statistics.mean(r[0]["period"] for r in mine), len(mine)


def budget() -> None:
    for rate, duration in (("20mbit", 110.0), ("100mbit", 60.0), ("1gbit", 40.0)):
        with Lab(4, rate=rate) as lab:
            command = [sys.executable, WORKER, "budget", BUDGET, str(STEP), str(duration)]
            told = [lines(run) for run in lab.run(command, timeout=600)]
            exposed, waited, period, rounds = settle(told, 0.0)
            keep(benchmark="budget", rate=rate, exposed=exposed, waited=waited, period=period, rounds=rounds)
    with Lab(4, rate="1gbit") as lab:
        job = lab.start([sys.executable, WORKER, "budget", BUDGET, str(STEP), "120"])
        time.sleep(40.0)
        lab.set_rate("50mbit")
        changed = max(row["t"] for row in map(json.loads, job.stdout(rank=0).splitlines()))
        told = [lines(run) for run in job.wait(timeout=600)]
        exposed, waited, period, rounds = settle(told, changed)
        row = {"exposed": exposed, "waited": waited, "period": period, "rounds": rounds}
        keep(benchmark="budget", rate="1gbit, then 50mbit", periods=[r["period"] for r in told[0]], **row)


def table() -> None:
    """Print the results as tables."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    print("| method | seed | samples/s | loss at 16 000 samples | at 19 200 |\n|---|---|---|---|---|")
    for row in [row for row in rows if row["benchmark"] == "straggler"]:
        rounds = row["rounds"]
        speed = rounds[-1]["samples"] / rounds[-1]["seconds"]
        losses = " | ".join(f"{at(rounds, samples):.4f}" for samples in (16_000, SAMPLES))
        print(f"| `{row['method']}` | {row['seed']} | {speed:.0f} | {losses} |")
    print("\n| links | period | rounds | exposed | all waiting | load |\n|---|---|---|---|---|---|")
    for row in [row for row in rows if row["benchmark"] == "budget"]:
        shares = f"{row['exposed']:.1%} | {row['waited']:.1%}"
        print(f"| {row['rate']} | {row['period']:.0f} | {row['rounds']} | {shares} | {row['load']:.0f} |")


def main() -> None:
    if sys.argv[1] == "table":
        return table()
    if reason := unavailable():
        raise SystemExit(reason)
    {"straggler": straggler, "budget": budget}[sys.argv[1]]()


if __name__ == "__main__":
    main()
