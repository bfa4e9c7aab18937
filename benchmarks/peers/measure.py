"""Timing, losses and whole runs. Each appends a line to results.jsonl, and none repeats what is there."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import report
import torch
from contenders import BY_NAME, CONTENDERS, Contender
from training import WORKERS, Setting, curve, simulated_runs

from offbeat.lab import Lab, Run, unavailable

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
SEARCH_SEEDS = (0,)

Row = dict[str, Any]


def add(row: Row) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)


def known(row: Row) -> bool:
    return any(all(other.get(key) == value for key, value in row.items()) for other in report.read(RESULTS))


def chosen(names: Iterable[str]) -> list[Contender]:
    """The contenders whose names contain one of the words; all for none."""
    words = list(names)
    found = [c for c in CONTENDERS if not words or any(word in c.name for word in words)]
    if not found:
        raise SystemExit(f"No contender is named like {', '.join(words)}: {', '.join(BY_NAME)}.")
    return found


def common(setting: Setting) -> Row:
    """The setting as it is logged: the name of the data, not its path."""
    return {**asdict(setting), "data": Path(setting.data).name if setting.data else None}


def run_in(lab: Lab, order: Row, timeout: float) -> tuple[Run, ...]:
    runs = lab.run([sys.executable, str(HERE / "worker.py"), json.dumps(order)], timeout=timeout)
    for run in runs:
        if run.returncode:
            raise SystemExit(f"{order['contender']}, rank {run.rank}: {run.stderr[-3000:]}")
    return runs


def told(runs: tuple[Run, ...]) -> list[Row]:
    """The last line that each worker printed."""
    return [json.loads(run.stdout.strip().splitlines()[-1]) for run in runs]


def need_lab() -> None:
    if reason := unavailable():
        raise SystemExit(reason)


def timing(setting: Setting, link: str, names: list[str], *, blocks: int, steps: int) -> None:
    """Blocks of steps, contenders in turn. A block has whole periods; DDP's are shorter on slow links."""
    need_lab()
    with Lab(WORKERS, rate=link) as lab:
        for block in range(blocks):
            for contender in (one for one in chosen(names) if not one.pace):
                row: Row = {"kind": "timing", "link": link, "contender": contender.name, "block": block}
                if known(row):
                    continue
                full = contender.losses == "ddp()" and link != "1gbit"
                count = max(1, steps // contender.period) * contender.period // (2 if full else 1)
                warm = max(2, contender.period)
                order = {"contender": contender.name, "setting": asdict(setting)}
                found = told(run_in(lab, {**order, "warm": warm, "steps": count}, timeout=900))
                seconds = [round(one["seconds"], 5) for one in found]
                sent = round(statistics.mean(one["bytes"] for one in found))
                add(
                    {
                        **row,
                        "steps": count,
                        "seconds": max(seconds),
                        "bytes": sent,
                        "torch": torch.__version__,
                    }
                )


def real(setting: Setting, link: str, names: list[str]) -> None:
    """One whole run each, at the best rate of its rule."""
    need_lab()
    for contender in chosen(names):
        rate = report.best_rate(report.read(RESULTS), contender.searched) or setting.lr
        mine = replace(setting, lr=rate, steps=contender.steps)
        row: Row = {"kind": "real", "link": link, "contender": contender.name, **common(mine)}
        if known(row):
            continue
        with Lab(WORKERS, rate=link) as lab, tempfile.TemporaryDirectory() as out:
            order = {"contender": contender.name, "setting": asdict(mine), "out": out}
            found = told(run_in(lab, order, timeout=3600))
            points = curve(mine, [torch.load(Path(out) / f"{rank}.pt") for rank in range(WORKERS)])
        sent = round(statistics.mean(one["bytes"] for one in found))
        _, seconds, last = points[-1]
        add(
            {
                **row,
                "seconds": seconds,
                "loss": last,
                "bytes": sent,
                "curve": points,
                "torch": torch.__version__,
            }
        )


def loss(setting: Setting, names: list[str], *, seeds: int | None = None, first: int = 0) -> None:
    """Whole runs in simulation: with several seeds, at the best rate of the search."""
    wanted: dict[tuple[str, str | None, int], int] = {}
    for contender in chosen(names):
        if contender.losses:
            run = (contender.losses, contender.searched, contender.steps)
            wanted[run] = max(wanted.get(run, 0), contender.seeds)
    for seed in range(first, seeds or max(wanted.values(), default=0)):
        for (rule, searched, steps), most in wanted.items():
            if seed < (seeds or most):
                rate = report.best_rate(report.read(RESULTS), searched)
                if rate is None:
                    raise SystemExit(f"No learning rate of {searched} is known yet: run.py search.")
                simulate(replace(setting, lr=rate, steps=steps, seed=seed), rule)


def search(setting: Setting, names: list[str]) -> None:
    """Every rule with every rate, with the first seed."""
    rules = dict.fromkeys(c.searched for c in chosen(names) if c.searched)
    for rule in rules:
        for rate in report.RATES:
            for seed in SEARCH_SEEDS:
                simulate(replace(setting, size=report.SEARCHED, lr=rate, seed=seed), rule)


def simulate(setting: Setting, rule: str) -> None:
    row: Row = {"kind": "loss", "rule": rule, **common(setting)}
    if known(row):
        return
    torch.set_num_threads(1)
    start = time.perf_counter()
    points = [(step, value) for step, _, value in curve(setting, simulated_runs(setting, rule))]
    took = round(time.perf_counter() - start, 1)
    add({**row, "loss": points[-1][1], "curve": points, "took": took, "torch": torch.__version__})
