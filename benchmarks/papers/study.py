"""What the scripts of this folder share: runs of a grid, a log to resume from, tables and sections of a page.

A contender is a `Cell`. Each is run at every rate of the grid of its optimizer with seed 0. If the best is at
an end of the grid, one more rate is tried beyond that end. Then it is run at its best rate with the other
seeds. The best rate is that with the lowest held-out loss. Contenders of a table make equally many gradient
steps on batches of equal size. Each run is a line of NAME.jsonl beside the script; runs that are there are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.tasks import Task, images_task
from offbeat.tasks.pictures import Labelled, load_digits, use_seed
from offbeat.tasks.task import adamw, heavy_ball

HERE = Path(__file__).parent
OPTIMIZERS = {"sgd": heavy_ball, "adamw": adamw}
RATES = {"sgd": (0.05, 0.125, 0.3), "adamw": (1e-3, 3e-3, 1e-2)}
BEYOND = 2.5  # how far beyond an end of the grid one more rate is tried
# Milliseconds of one step of one worker: on one core of an idle machine, if the log has no run to tell.
COST = {"digits": 1.2, "noisy": 1.2, "images": 9.0}
# Virtual seconds of a step, where a run is on a link.
STEP = {"digits": 0.005, "noisy": 0.005, "images": 0.05}
DELAY = 5  # how many steps a delayed step takes longer
CURVE = 8  # evaluations of a run whose time counts
MISSING = "not run yet"
NEED_DATA = {"images": "a zip of pictures such as CIFAR-10"}


@dataclass(frozen=True)
class Cell:
    """A contender in its setting. In `method`, `lr*2` stands for twice the rate of the run."""

    method: str
    task: str = "digits"
    optimizer: str = "sgd"
    decay: str = "cosine"
    workers: int = 4
    steps: int = 300
    batch: int = 8
    link: float = 0.0  # Mbit/s of each worker's link; 0 has no limit
    late: float = 0.0  # the share of steps that are delayed

    @property
    def timed(self) -> bool:
        return bool(self.link or self.late)


@dataclass(frozen=True)
class Section:
    """A part of docs/papers.md: a heading, what was run, a table and its figure."""

    title: str
    text: str
    table: str
    figures: Mapping[str, str] = field(default_factory=dict)  # SVGs by name


@dataclass(frozen=True)
class Found:
    """The runs of a contender at its best rate."""

    lr: float
    edge: bool  # whether the best rate is an end of all that were tried
    rows: list[dict[str, Any]]

    def values(self, name: str) -> list[float]:
        return [math.inf if row[name] is None else row[name] for row in self.rows]

    def mean(self, name: str) -> float:
        return statistics.mean(self.values(name))

    def show(self, name: str, form: str = ".4f") -> str:
        """The mean, and the deviation between seeds. Columns say which values are in %."""
        values = self.values(name)
        if not all(map(math.isfinite, values)):
            return f"diverges ({sum(map(math.isinf, values))} of {len(values)})"
        spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}".replace("%", "")


class Log:
    """The runs of a script, by what was run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._known = {self.key(row): row for row in self.rows}

    @staticmethod
    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in (*Cell.__dataclass_fields__, "lr", "seed"))

    def get(self, cell: Cell, lr: float, seed: int) -> dict[str, Any] | None:
        return self._known.get(self.key({**asdict(cell), "lr": lr, "seed": seed}))

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self._known[self.key(row)] = row

    def wider(self, cell: Cell, rates: Sequence[float]) -> list[float]:
        """The rates, and one more beyond the end at which the best of them is."""
        best = self._lowest(cell, rates)
        if best is None or len(rates) == 1:
            return list(rates)
        low = [float(f"{min(rates) / BEYOND:.2g}")] if best == min(rates) else []
        high = [float(f"{max(rates) * BEYOND:.2g}")] if best == max(rates) else []
        return [*low, *rates, *high]

    def best(self, cell: Cell, rates: Sequence[float]) -> Found | None:
        """The runs at the rate with the lowest held-out loss of seed 0, once all rates have been tried."""
        lr = self._lowest(cell, rates)
        if lr is None:
            return None
        seeds = sorted({row["seed"] for row in self.rows})
        rows = [row for seed in seeds if (row := self.get(cell, lr, seed)) is not None]
        return Found(lr, lr in (min(rates), max(rates)), rows)

    def _lowest(self, cell: Cell, rates: Sequence[float]) -> float | None:
        tried = {lr: self.get(cell, lr, 0) for lr in rates}
        if not all(tried.values()):
            return None
        losses = {lr: row["loss"] for lr, row in tried.items() if row is not None}
        return min(rates, key=lambda lr: math.inf if losses[lr] is None else losses[lr])


@dataclass(frozen=True)
class Study:
    """The runs that answer a paper's claims, and how they are told."""

    name: str
    cells: Sequence[Cell]
    tell: Callable[[Study, Log], list[Section]]
    rates: Mapping[str, Sequence[float]] = field(default_factory=lambda: RATES)

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.jsonl"

    def find(self, log: Log, cell: Cell) -> Found | None:
        rates = self.rates[cell.optimizer]
        return log.best(cell, log.wider(cell, rates)) or log.best(cell, rates)

    def missing(self, log: Log, cell: Cell, seeds: int) -> list[tuple[float, int]]:
        """Rates and seeds that have not been run, as far as known: all rates, then seeds at the best."""
        rates = log.wider(cell, self.rates[cell.optimizer])
        best = log.best(cell, rates)
        if best is None:
            left = [(lr, 0) for lr in rates if log.get(cell, lr, 0) is None]
            return [*left, *((rates[0], seed) for seed in range(1, seeds))]
        return [(best.lr, seed) for seed in range(1, seeds) if log.get(cell, best.lr, seed) is None]

    def sections(self, log: Log | None = None) -> list[Section]:
        return self.tell(self, log or Log(self.path))

    def minutes(self, log: Log, seeds: int) -> tuple[int, float]:
        """How many runs are missing, and how long they take on one core."""
        runs, seconds = 0, 0.0
        for cell in self.cells:
            own = [row for row in log.rows if row["task"] == cell.task]
            spent = [1000 * row["cpu"] / row["workers"] / row["steps"] for row in own]
            cost = statistics.median(spent) if spent else COST[cell.task]
            missing = len(self.missing(log, cell, seeds))
            runs += missing
            seconds += missing * cell.workers * cell.steps * cost / 1000
        return runs, seconds / 60


def rate(decay: str, step: int, steps: int) -> float:
    """A warm-up over a twentieth of the steps, then a cosine to 0, or a tenth after 1/2 and after 3/4."""
    warmup = steps // 20
    if step < warmup:
        return (step + 1) / warmup
    if decay == "step":
        return 0.1 ** ((step >= steps // 2) + (step >= 3 * steps // 4))
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def perceptron(seed: int) -> nn.Module:
    """One hidden layer of 96: 7 210 parameters."""
    with use_seed(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


@cache
def build_task(name: str, seed: int, data: str | None, folder: str | None) -> Task:
    """`noisy` is digits with a fifth of the training labels drawn at random, where generalization shows."""
    if name == "images":
        assert data is not None
        return images_task("tiny", data=data, pixels=16, cache=folder, seed=seed)
    pictures, labels = load_digits()
    trained = len(labels) - len(labels) // 5
    if name == "noisy":
        draw = torch.Generator().manual_seed(0)
        wrong = torch.rand(trained, generator=draw) < 0.2
        labels = labels.clone()
        labels[:trained][wrong] = torch.randint(10, (int(wrong.sum()),), generator=draw)
    return Labelled(pictures, labels, trained).task(name, partial(perceptron, seed))


def fill(method: str, lr: float) -> str:
    """The call at this rate: `alpha=lr*2` becomes a number."""
    return re.sub(r"lr\*([\d.]+)", lambda found: repr(float(found[1]) * lr), method)


def train(comm: offbeat.Communicator, cell: Cell, task: Task, lr: float, seed: int) -> dict[str, Any]:
    model = task.model()
    optimizer = OPTIMIZERS[cell.optimizer](model.parameters(), lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(cell.decay, step, cell.steps))
    batches = task.batches(comm.rank, comm.size, cell.batch, seed)
    sync = offbeat.method(fill(cell.method, lr))(model, optimizer, group=comm)
    drifts: list[float] = []
    sync.on_report = lambda report: (
        drifts.append(math.sqrt(report.drift)) if report.drift is not None else None
    )
    losses, curve, apart, extra = [], [], 0.0, 0
    for step in range(1, cell.steps + 1):
        loss = task.loss(model, next(batches))
        loss.backward()
        sync.observe(loss)
        sync.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if cell.timed and step % max(1, cell.steps // CURVE) == 0:
            before, sent = comm.now(), sync.totals.bytes_sent
            with sync.averaged():
                curve.append([before - apart, task.evaluate(model) if comm.rank == 0 else 0.0])
            # What the evaluation takes and sends is not the method's.
            apart, extra = apart + comm.now() - before, extra + sync.totals.bytes_sent - sent
    seconds, totals = comm.now() - apart, sync.totals
    rounds, megabytes, missed = totals.rounds, (totals.bytes_sent - extra) / 1e6, totals.late
    sync.finish()
    own = {"loss": 0.0, "accuracy": 0.0}
    if comm.rank == 0:
        own["loss"] = task.evaluate(model)
        own["accuracy"] = task.accuracy(model) if task.accuracy else 0.0
    full = 8 * sum(p.numel() for p in model.parameters()) * (comm.size - 1) / comm.size * cell.steps / 1e6
    own |= {"train": statistics.mean(losses[-max(1, cell.steps // 10) :]), "rounds": rounds, "missed": missed}
    own |= {"share": megabytes / full, "drift": statistics.mean(drifts) if drifts else 0.0}
    return own | {"seconds": seconds, "curve": curve}


def run(cell: Cell, task: Task, lr: float, seed: int) -> dict[str, Any]:
    step = STEP[cell.task]
    timing: dict[str, Any] = {"compute": offbeat.Constant(step)} if cell.timed else {}
    if cell.late:
        usual = offbeat.Jittered(step, 0.05, seed=seed)
        timing["compute"] = offbeat.Stragglers(usual, cell.late, DELAY * step, seed)
    if cell.link:
        timing["network"] = offbeat.Network(latency=2e-4, bandwidth=cell.link * 1e6 / 8, reduce="ring")
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rate that is too high for a method is an answer
        answers = offbeat.simulate(lambda comm: train(comm, cell, task, lr, seed), cell.workers, **timing)
    found = answers[0]
    found["train"] = statistics.mean(answer["train"] for answer in answers)
    found["missed"] = statistics.mean(answer["missed"] for answer in answers)
    found = {name: rounded(value) for name, value in found.items()}
    return {**asdict(cell), "lr": lr, "seed": seed, **found, "cpu": round(time.process_time() - start, 2)}


def rounded(value: Any) -> Any:
    """Six digits are enough; what is not finite becomes None."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return (float(f"{value:.6g}") if math.isfinite(value) else None) if isinstance(value, float) else value


def measure(study: Study, log: Log, args: argparse.Namespace) -> None:
    """Make the runs that are missing: of each contender all rates, then the other seeds at the best."""
    left = args.limit
    for given in study.cells:
        cell = replace(given, steps=args.steps or given.steps)
        if args.only not in str(cell):
            continue
        if cell.task in NEED_DATA and args.data is None:
            print(f"{cell.method} needs --data, {NEED_DATA[cell.task]}: left out", flush=True)
            continue
        while missing := study.missing(log, cell, args.seeds):
            lr, seed = missing[0]
            if left == 0:
                return
            row = run(cell, build_task(cell.task, seed, args.data, args.cache), lr, seed)
            log.add(row | ({"data": Path(args.data).name} if cell.task in NEED_DATA else {}))
            left -= 1
            told = f"{cell.task} {cell.optimizer} {cell.decay}, {cell.workers} workers, {cell.method}"
            print(f"{told}, lr {lr:g}, seed {seed}: {row['loss']} in {row['cpu']} s", flush=True)


def main(study: Study, manual: str | None) -> None:
    parser = argparse.ArgumentParser(description=manual, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what is missing, and how long it takes")
    parser.add_argument("--table", action="store_true", help="what the log says, without a run")
    parser.add_argument("--data", help="a zip of pictures, for the contenders that need one")
    parser.add_argument("--cache", help="a folder for decoded pictures")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose description contains this, as 'sgd'")
    parser.add_argument("--limit", type=int, default=-1, help="make at most so many runs")
    parser.add_argument("--steps", type=int, help="other than the usual number, to try a script")
    parser.add_argument("--results", type=Path, default=study.path)
    args = parser.parse_args()
    log = Log(args.results)
    if args.list:
        runs, minutes = study.minutes(log, args.seeds)
        for cell in study.cells:
            print(f"{len(study.missing(log, cell, args.seeds))} runs are missing: {cell}")
        print(f"{study.name}: {runs} runs are missing, about {minutes:.0f} minutes on one core.")
        return
    torch.set_num_threads(1)
    if not args.table:
        measure(study, log, args)
    for section in study.sections(log):
        print(f"\n## {section.title}\n\n{section.text}\n\n{section.table}")


def pivot(
    corner: str,
    rows: Iterable[str],
    columns: Iterable[str],
    cell: Callable[[str, str], str | None],
) -> str:
    """A table of `cell(row, column)`; None becomes "not run yet".

    Rows and columns of which nothing has been run are left out, unless nothing has been run at all.
    """
    titles, names = list(rows), list(columns)
    found = {(row, name): cell(row, name) for row in titles for name in names}
    known = [key for key, value in found.items() if value not in (None, "–")]
    if known:
        titles = [row for row in titles if any(row == one for one, _ in known)]
        names = [name for name in names if any(name == one for _, one in known)]
    lines = [f"| {corner} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for row in titles:
        lines.append(f"| {row} | {' | '.join(found[row, name] or MISSING for name in names)} |")
    return "\n".join(lines)


def code(method: str) -> str:
    return f"`{method}`"


def list_columns(
    study: Study, log: Log, cells: Sequence[Cell], columns: Mapping[str, Callable[[Found], str]]
) -> str:
    """A row per contender, with its rate; a star marks a rate at the end of the grid."""
    by_name = {code(cell.method): study.find(log, cell) for cell in cells}

    def tell(name: str, column: str) -> str | None:
        found = by_name[name]
        if found is None:
            return None
        if column == "lr":
            return f"{found.lr:g}{'*' if found.edge else ''}"
        return str(len(found.rows)) if column == "seeds" else columns[column](found)

    return pivot("method", by_name, [*columns, "lr", "seeds"], tell)


def loss_at(row: dict[str, Any], seconds: float) -> float:
    """The last loss that was seen by then."""
    seen = [loss for at, loss in row["curve"] if at <= seconds and loss is not None]
    return seen[-1] if seen else math.inf


def time_to(row: dict[str, Any], loss: float) -> float:
    """When the loss was first seen to be as low."""
    return next((at for at, seen in row["curve"] if seen is not None and seen <= loss), math.inf)
