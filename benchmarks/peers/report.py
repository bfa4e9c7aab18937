"""The tables of log.md, from results.jsonl alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contenders import BY_NAME, CONTENDERS, DDP, FLOOR, MORE, STEPS, Contender

SPARE = 1.25
NEAR = 1.005  # times the loss of torch DDP
FEW = 5  # seeds below which the tables of other losses leave a rule out
SEARCHED = "medium"  # the model of the search for learning rates
RATES = (1e-3, 2e-3, 3e-3)  # the learning rates that every rule is tried with
HEADER = (
    "| contender | s per step | ± | speed | seconds | × floor | loss | ± | seeds | against DDP "
    "| s to DDP's loss + 0.5 % | loss at equal time | MB per worker |"
)

PREFACE = """
Generated from results.jsonl by `run.py report`. Python 3.11.7, the versions of requirements.txt, torch on
CPU, four workers on two cores, two on each. Each worker has a network namespace with a shaped link, and one
thread. A byte GPT of 1 853 952 parameters learns tinyshakespeare in 300 steps of 4 × 8 windows of 128 bytes,
with AdamW, a warm-up of 40 steps, a cosine down to a tenth, and clipping at 1.

- `s per step`: the median over blocks of 20 steps that the contenders took in turn, and half of the range.
  Below 1 Gbit/s, torch DDP and `ddp()` made 10. Each block is a job and begins after a first period.
- `seconds`: of a whole run, from these. `speed` is against torch DDP, `× floor` against no communication.
- `loss`: validation loss at the end, mean and deviation over seeds, in simulation, at the best learning
  rate of the search. `against DDP` compares the same seeds, with the standard error of the mean.
- `s to DDP's loss + 0.5 %`: seconds to 1.005 times the final loss of torch DDP, on the mean of the seeds.
  `loss at equal time`: the loss when 1.25 times the time without communication has passed.
- `MB per worker`: what the kernel counted on a worker's interface, for a whole run.

A whole run has 300 steps, unless the contender's name says another number. Its schedule then has that many
steps too, and its learning rate is the best one of the search with 300.
""".strip()

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One contender on one link: how long its steps take, and its losses by step for each seed."""

    contender: Contender
    seconds: list[float]  # of a step, one value per block
    bytes: float
    curves: dict[int, list[tuple[int, float]]]
    ddp: tuple[float, float] = (0.0, 0.0)  # seconds and bytes of a step of torch DDP

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / 2

    def total(self, steps: float | None = None) -> float:
        """Seconds of that many steps, or of a whole run; the first may be steps of torch DDP."""
        steps = self.contender.steps if steps is None else steps
        first = min(steps, self.contender.start)
        return first * self.ddp[0] + (steps - first) * self.step

    @property
    def megabytes(self) -> float:
        first = self.contender.start
        return (first * self.ddp[1] + (self.contender.steps - first) * self.bytes) / 1e6

    @property
    def finals(self) -> list[float]:
        return [curve[-1][1] for curve in self.curves.values()]

    def points(self) -> list[tuple[float, float]]:
        """Seconds and mean loss over the seeds."""
        moments = zip(*self.curves.values(), strict=True)
        return [(self.total(moment[0][0]), statistics.mean(loss for _, loss in moment)) for moment in moments]

    def reaches(self, loss: float) -> float | None:
        """Seconds until the mean loss is first as low as that, on straight lines between evaluations."""
        before: tuple[float, float] | None = None
        for seconds, value in self.points():
            if value <= loss:
                if before is None or before[1] == value:
                    return seconds
                return before[0] + (before[1] - loss) / (before[1] - value) * (seconds - before[0])
            before = (seconds, value)
        return None

    def after(self, seconds: float) -> float | None:
        """The mean loss at that time: that of the end if the run has ended, None before an evaluation."""
        before: tuple[float, float] | None = None
        for at, loss in self.points():
            if at >= seconds:
                if before is None:
                    return None
                return before[1] + (seconds - before[0]) / (at - before[0]) * (loss - before[1])
            before = (at, loss)
        return before[1] if before else None


@dataclass(frozen=True)
class Beside:
    """A contender's losses beside those of torch DDP with the same seeds. Seconds are None for never."""

    loss: float
    goal: float  # the final loss of torch DDP
    error: float  # the standard error of loss / goal, from the differences seed by seed
    seconds: float | None  # until the loss is near the goal
    ddp_seconds: float | None  # the same of torch DDP

    @property
    def against(self) -> str:
        share = f"{100 * (self.loss / self.goal - 1):+.1f}"
        return f"{share} ± {100 * self.error:.1f} %" if self.error else f"{share} %"

    @property
    def reached(self) -> str:
        return "never" if self.seconds is None else f"{self.seconds:.0f}"

    @property
    def speed(self) -> str:
        if self.seconds is None or self.ddp_seconds is None:
            return "never"
        return f"{self.ddp_seconds / self.seconds:.2f}×"


def put_beside(result: Result, ddp: Result) -> Beside | None:
    """None if the contender has no losses, or seeds that torch DDP has not."""
    if not result.curves or not result.curves.keys() <= ddp.curves.keys():
        return None
    same = replace(ddp, curves={seed: ddp.curves[seed] for seed in result.curves})
    loss, goal = statistics.mean(result.finals), statistics.mean(same.finals)
    error = standard_error([a - b for a, b in zip(result.finals, same.finals, strict=True)]) / goal
    return Beside(loss, goal, error, *(one.reaches(NEAR * goal) for one in (result, same)))


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; 0 of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def best_rate(rows: Sequence[Row], rule: str | None) -> float | None:
    """The rate with the lowest loss. None before all rates were tried with the first seed.

    That seed alone does not decide between rates whose losses are close: the mean over all seeds does that
    both have.
    """
    losses: dict[float, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "loss" and (row["rule"], row["size"], row["steps"]) == (rule, SEARCHED, STEPS):
            losses.setdefault(row["lr"], {})[row["seed"]] = row["loss"]
    tried = {rate: seeds for rate, seeds in losses.items() if 0 in seeds}
    if not set(RATES) <= tried.keys():
        return None
    least = min(seeds[0] for seeds in tried.values())
    close = {rate: seeds for rate, seeds in tried.items() if seeds[0] <= NEAR * least}
    common = set.intersection(*map(set, close.values()))
    return min(close, key=lambda rate: statistics.mean(close[rate][seed] for seed in common))


def results(rows: Sequence[Row], link: str) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for contender in CONTENDERS:
        wanted = {"kind": "timing", "link": link, "contender": contender.pace or contender.name}
        timed = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        runs = [
            row
            for row in rows
            if row["kind"] == "loss"
            and (row["rule"], row["size"], row["steps"]) == (contender.losses, SEARCHED, contender.steps)
            and row["lr"] == best_rate(rows, contender.searched)
        ]
        if timed:
            sent = statistics.median(row["bytes"] for row in timed)
            seconds = [row["seconds"] for row in timed]
            curves = {row["seed"]: [(step, loss) for step, loss in row["curve"]] for row in runs}
            ddp = (found[DDP].step, found[DDP].bytes) if DDP in found else (0.0, 0.0)
            found[contender.name] = Result(contender, seconds, sent, curves, ddp)
    return found


def table(found: dict[str, Result]) -> list[str]:
    ddp, floor = found[DDP], found[FLOOR]
    lines = [HEADER, "|---" * 13 + "|"]
    for name, result in found.items():
        total = result.total()
        times = f"{result.step:.3f} | {result.spread:.3f} | {ddp.total() / total:.2f}× | {total:.0f} s "
        cells = [name, times + f"| {total / floor.total():.2f}"]
        if (beside := put_beside(result, ddp)) is not None:
            spread = f"{statistics.stdev(result.finals):.4f}" if len(result.finals) > 1 else ""
            level = result.after(SPARE * floor.total())
            cells += [f"{beside.loss:.4f}", spread, str(len(result.finals)), beside.against]
            cells += [beside.reached, "" if level is None else f"{level:.3f}"]
        else:
            cells += [""] * 6
        lines.append("| " + " | ".join([*cells, f"{result.megabytes:.1f}"]) + " |")
    return lines


def summary(rows: Sequence[Row]) -> str:
    """What docs/benchmarks.md shows: time and loss at 50 Mbit/s, and the speed on all links."""
    found = results(rows, "50mbit")
    lines = [
        "| contender | seconds | speed | × floor | loss | against DDP, seeds "
        "| s to DDP's loss + 0.5 % | MB per worker |",
        "|---" * 8 + "|",
    ]
    ddp, floor = found[DDP], found[FLOOR]
    for name, result in found.items():
        total, told = result.total(), [""] * 3
        if (beside := put_beside(result, ddp)) is not None:
            told = [f"{beside.loss:.3f}", f"{beside.against}, {len(result.finals)}"]
            told += [beside.reached]
        speed = f"{total:.0f} s | {ddp.total() / total:.2f}× | {total / floor.total():.2f}"
        lines.append(f"| {name} | {speed} | {' | '.join(told)} | {result.megabytes:.0f} |")
    lines += ["", "Speed against torch DDP, by link, for as many steps:", ""]
    lines += by_link(rows, lambda r, ddp: "" if r.contender.pace else f"{ddp.total() / r.total():.2f}×")
    lines += ["", "Speed against torch DDP, by link, until the loss is within 0.5 % of its last one:", ""]
    lines += by_link(rows, lambda result, ddp: b.speed if (b := put_beside(result, ddp)) else "")
    lines += [
        "",
        f"The same run with {MORE} steps:",
        "",
        *other_losses(rows, SEARCHED, MORE),
        "",
        "The same run of a model of 0.25 M parameters:",
        "",
        *other_losses(rows, "tiny", STEPS),
    ]
    return "\n".join(lines)


def by_link(rows: Sequence[Row], tell: Callable[[Result, Result], str]) -> list[str]:
    """A table of what `tell` says of a contender and torch DDP on each link; without empty rows."""
    links = {link: results(rows, link) for link in ("20mbit", "50mbit", "100mbit", "1gbit")}
    lines = ["| contender | " + " | ".join(links) + " |", "|---" * (len(links) + 1) + "|"]
    for name in BY_NAME:
        cells = [tell(timed[name], timed[DDP]) if name in timed else "" for timed in links.values()]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def fill(page: str, text: str) -> str:
    """The page with this text between the markers."""
    begin, end = "<!-- peers: generated by benchmarks/peers/run.py report -->", "<!-- peers: end -->"
    first, rest = page.split(begin)
    return f"{first}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def checks(rows: Sequence[Row]) -> list[str]:
    """Real runs beside what timing and simulation say about them."""
    lines = [
        "| contender | link | seconds | predicted | loss | simulated | MB per worker |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        if row["kind"] != "real" or row["size"] != SEARCHED:
            continue
        contender = BY_NAME[row["contender"]]
        key = (contender.losses, row["lr"], row["seed"], row["size"], row["steps"])
        names = ("rule", "lr", "seed", "size", "steps")
        same = [r["loss"] for r in rows if r["kind"] == "loss" and tuple(r[name] for name in names) == key]
        timed = results(rows, row["link"]).get(contender.name)
        cells = [
            contender.name,
            row["link"],
            f"{row['seconds']:.0f}",
            f"{timed.total():.0f}" if timed else "",
        ]
        cells += [f"{row['loss']:.4f}", f"{same[0]:.4f}" if same else "", f"{row['bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def rates(rows: Sequence[Row]) -> list[str]:
    """The search: the loss with the first seed, by learning rate."""
    kind = ("loss", SEARCHED, STEPS, 0)
    searched = [r for r in rows if (r["kind"], r.get("size"), r["steps"], r.get("seed")) == kind]
    tried = sorted({row["lr"] for row in searched})
    lines = [
        "| rule | " + " | ".join(f"{rate:g}" for rate in tried) + " | best |",
        "|---" * (len(tried) + 2) + "|",
    ]
    for rule in dict.fromkeys(row["rule"] for row in searched):
        losses = [[r["loss"] for r in searched if (r["rule"], r["lr"]) == (rule, rate)] for rate in tried]
        means = " | ".join(f"{statistics.mean(one):.3f}" if one else "" for one in losses)
        best = best_rate(rows, rule)
        lines.append(f"| `{rule}` | {means} | {'' if best is None else f'{best:g}'} |")
    return lines


def log(rows: Sequence[Row]) -> str:
    parts = [PREFACE]
    for link in ("20mbit", "50mbit", "100mbit", "1gbit"):
        found = results(rows, link)
        if DDP in found and FLOOR in found:
            parts.append("\n".join([f"## {link}", "", *table(found)]))
    parts.append("\n".join(["## Real runs", "", *checks(rows)]))
    parts.append("\n".join(["## Learning rates", "", *rates(rows)]))
    for title, size, steps in ((f"{MORE} steps", SEARCHED, MORE), ("0.25 M parameters", "tiny", STEPS)):
        parts.append("\n".join([f"## {title}, lr {RATES[-1]:g}", "", *other_losses(rows, size, steps)]))
    return "\n\n".join(parts) + "\n"


def other_losses(rows: Sequence[Row], size: str, steps: int) -> list[str]:
    """Rules at the highest rate with enough seeds, beside the exact mean with the same seeds."""
    finals: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "loss" and (row["size"], row["steps"], row["lr"]) == (size, steps, RATES[-1]):
            finals.setdefault(row["rule"], {})[row["seed"]] = row["loss"]
    exact = finals["ddp()"]
    lines = ["| rule | loss | against `ddp()` | seeds |", "|---" * 4 + "|"]
    for rule, own in finals.items():
        seeds = sorted(own.keys() & exact.keys())
        if len(seeds) >= FEW:
            differences = [100 * (own[seed] / exact[seed] - 1) for seed in seeds]
            share = (
                f"{statistics.mean(differences):+.2f} ± {standard_error(differences):.2f} %"
                if own is not exact
                else ""
            )
            loss = statistics.mean(own[seed] for seed in seeds)
            lines.append(f"| `{rule}` | {loss:.4f} | {share} | {len(seeds)} |")
    return lines


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
