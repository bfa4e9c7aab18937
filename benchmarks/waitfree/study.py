"""The loss of workers that wait for nobody, without the noise of a machine: in a simulation's virtual time.

    python benchmarks/waitfree/study.py             # 4 and 8 workers, delayed and not, and a longer grace
    python benchmarks/waitfree/study.py 4 delayed   # one of them

The network, the data and the delays of run.py; steps vary by a twentieth of their time, messages take a fifth
of a millisecond, and the learning rate falls to 0, so that the loss is that of a run that has ended. Seeds
change weights, batches and delays. Appends to study.jsonl and prints a table.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from problem import BATCH, DELAY, LR, STEP, Digits, Net, blocking, sgd

import offbeat
from offbeat import Communicator, GroupReport, Network

HERE = Path(__file__).parent
STEPS = 240
SEEDS = 3
JITTER = 0.05  # of a step, one deviation
NETWORK = Network(latency=2e-4)
CASES = [(4, "delayed"), (8, "delayed"), (4, "even"), (8, "even"), (4, "grace")]
FIRST = "local_sgd(every=1)"
WAITFREE = [
    "wagma(every=10, grace=0)",
    "wagma(every=10)",
    "wagma(every=10, grace=0, late='add')",
    "wagma(every=10, late='add')",
]
CONTENDERS = {
    "delayed": [
        FIRST,
        "blocking groups",
        *WAITFREE,
        "wagma(every=20, late='add')",
        "eager_sgd(every=10)",
    ],
    "even": [FIRST, "blocking groups", *WAITFREE],
    "grace": [FIRST, *(f"wagma(every=10, grace={n * STEP:g})" for n in (0, 0.25, 0.5, 1, 2, 4, 8))],
}


def compute(case: str, workers: int, seed: int) -> Callable[[int, int], float]:
    """Seconds of a worker's step."""

    def seconds(rank: int, step: int) -> float:
        slow = [] if case == "even" else random.Random(f"{seed} {step}").sample(range(workers), workers // 4)
        usual = STEP * max(0.5, random.Random(f"{seed} {rank} {step}").gauss(1, JITTER))
        return usual + DELAY * (rank in slow)

    return seconds


def train(comm: Communicator, name: str, seed: int) -> dict[str, Any]:
    net = Net(seed)
    optimizer = sgd(net)
    build = blocking if name == "blocking groups" else offbeat.method(name)
    sync = build(net, optimizer, group=comm)
    groups: list[GroupReport] = []
    waited = 0.0

    def listen(report: offbeat.Report) -> None:
        nonlocal waited
        waited += report.seconds_waited
        if isinstance(report, GroupReport):
            groups.append(report)

    sync.on_report = listen
    data = Digits(comm.rank, comm.size)
    draw = torch.Generator().manual_seed(1000 * seed + comm.rank)
    curve = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        (net.loss(*data.batch(BATCH, draw)) - net.way).backward()
        sync.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            with sync.averaged(), torch.no_grad():
                curve.append((comm.now(), net.loss(*data.held_out).item()))
    late = sum(report.kind != "fresh" for report in groups) / max(1, len(groups))
    with sync.averaged(), torch.no_grad():
        learnt = net.loss(*data.learnt).item()
    return {
        "seconds": curve[-1][0],
        "loss": curve[-1][1],
        "training_loss": learnt,
        "curve": curve,
        "kept": net.way.item() / STEPS,
        "late": late,
        "waited": waited,
    }


def measured(name: str, workers: int, case: str, seed: int) -> dict[str, Any]:
    runs = offbeat.simulate(
        lambda comm: train(comm, name, seed), workers, compute=compute(case, workers, seed), network=NETWORK
    )
    shares = {key: statistics.mean(run[key] for run in runs) for key in ("late", "waited")}
    return {"workers": workers, "case": case, "method": name, "seed": seed, **runs[0], **shares}


def loss_at(row: dict[str, Any], seconds: float) -> float:
    """The last loss that was seen by then."""
    return float([loss for at, loss in row["curve"] if at <= seconds][-1])


def line(rows: list[dict[str, Any]], firsts: list[dict[str, Any]], quickest: list[float]) -> str:
    def mean(of: Callable[[dict[str, Any], dict[str, Any]], float]) -> float:
        return statistics.mean(of(row, first) for row, first in zip(rows, firsts, strict=True))

    cells = [
        f"`{rows[0]['method']}`",
        f"{mean(lambda row, first: first['seconds'] / row['seconds']):.2f}",
        f"{mean(lambda row, first: row['loss']):.4f}",
        f"{mean(lambda row, first: row['loss'] / first['loss']):.3f}",
        f"{mean(lambda row, first: row['training_loss'] / first['training_loss']):.3f}",
        f"{statistics.mean(loss_at(row, by) for row, by in zip(rows, quickest, strict=True)):.4f}",
        f"{mean(lambda row, first: row['kept']):.1%}",
        f"{mean(lambda row, first: row['late']):.1%}",
        f"{mean(lambda row, first: row['waited'] / row['seconds']):.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    cases = [(int(sys.argv[1]), sys.argv[2])] if len(sys.argv) > 2 else CASES
    for workers, case in cases:
        table: list[list[dict[str, Any]]] = []
        for name in CONTENDERS[case]:
            table.append([measured(name, workers, case, seed) for seed in range(SEEDS)])
            with (HERE / "study.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in table[-1])
        quickest = [min(row["seconds"] for row in column) for column in zip(*table, strict=True)]
        print(f"\n{workers} workers, {case}, {STEPS} steps, {SEEDS} seeds\n")
        print("| method | speed | loss | ratio | training | at equal time | kept | late | waited |")
        print("|---|---|---|---|---|---|---|---|---|")
        for rows in table:
            print(line(rows, table[0], quickest), flush=True)


if __name__ == "__main__":
    main()
