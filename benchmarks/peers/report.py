"""Tables and figure, from results.jsonl alone: log.md beside this file, and docs/peers.svg."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import BY_NAME, CONTENDERS, DDP, FLOOR, Contender

HERE = Path(__file__).resolve().parent
STEPS, NEAR, SPARE = 300, 1.005, 1.25
HEADER = (
    "| contender | s per step | ± | speed | {steps} steps | × floor | loss | ± | seeds | against DDP "
    "| s to DDP's loss | loss at equal time | MB per worker |"
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One contender on one link: how long its steps take, and its losses by step, one list per seed."""

    contender: Contender
    seconds: list[float]  # of a step, one value per block
    bytes: float
    curves: list[list[tuple[int, float]]]
    ddp: tuple[float, float] = (0.0, 0.0)  # seconds and bytes of a step of torch DDP

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / 2

    def total(self, steps: float = STEPS) -> float:
        """Seconds of that many steps; the first may be steps of torch DDP."""
        first = min(steps, self.contender.start)
        return first * self.ddp[0] + (steps - first) * self.step

    @property
    def megabytes(self) -> float:
        first = self.contender.start
        return (first * self.ddp[1] + (STEPS - first) * self.bytes) / 1e6

    @property
    def finals(self) -> list[float]:
        return [curve[-1][1] for curve in self.curves]

    def points(self) -> list[tuple[float, float]]:
        """Seconds and mean loss over the seeds."""
        steps = [step for step, _ in self.curves[0]] if self.curves else []
        means = [statistics.mean(curve[i][1] for curve in self.curves) for i in range(len(steps))]
        return [(self.total(step), loss) for step, loss in zip(steps, means, strict=True)]

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


def results(rows: Sequence[Row], link: str, best: Callable[[str | None], float | None]) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for contender in CONTENDERS:
        wanted = {"kind": "timing", "link": link, "contender": contender.name}
        timed = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        runs = [
            row
            for row in rows
            if row["kind"] == "loss"
            and (row["rule"], row["size"], row["steps"]) == (contender.losses, "medium", STEPS)
            and row["lr"] == best(contender.losses)
        ]
        if timed:
            sent = statistics.median(row["bytes"] for row in timed)
            seconds = [row["seconds"] for row in timed]
            curves = [[(step, loss) for step, loss in row["curve"]] for row in runs]
            ddp = (found[DDP].step, found[DDP].bytes) if DDP in found else (0.0, 0.0)
            found[contender.name] = Result(contender, seconds, sent, curves, ddp)
    return found


def table(found: dict[str, Result]) -> list[str]:
    ddp, floor = found[DDP], found[FLOOR]
    goal = statistics.mean(ddp.finals) if ddp.finals else None
    lines = [HEADER.format(steps=STEPS), "|---" * 13 + "|"]
    for name, result in found.items():
        total = result.total()
        times = f"{result.step:.3f} | {result.spread:.3f} | {ddp.total() / total:.2f}× | {total:.0f} s "
        cells = [name, times + f"| {total / floor.total():.2f}"]
        if result.finals and goal is not None:
            loss = statistics.mean(result.finals)
            spread = f"{statistics.stdev(result.finals):.4f}" if len(result.finals) > 1 else ""
            reached, level = result.reaches(NEAR * goal), result.after(SPARE * floor.total())
            cells += [f"{loss:.4f}", spread, str(len(result.finals)), f"{loss / goal - 1:+.1%}"]
            cells += [
                "never" if reached is None else f"{reached:.0f}",
                "" if level is None else f"{level:.3f}",
            ]
        else:
            cells += [""] * 6
        lines.append("| " + " | ".join([*cells, f"{result.megabytes:.1f}"]) + " |")
    return lines


def checks(rows: Sequence[Row]) -> list[str]:
    """Real runs beside what timing and simulation say about them."""
    lines = [
        "| contender | link | seconds | predicted | loss | simulated | MB per worker |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        if row["kind"] != "real" or row["steps"] != STEPS or row["size"] != "medium":
            continue
        contender = BY_NAME[row["contender"]]
        key = (contender.losses, row["lr"], row["seed"], row["size"], row["steps"])
        names = ("rule", "lr", "seed", "size", "steps")
        same = [r["loss"] for r in rows if r["kind"] == "loss" and tuple(r[name] for name in names) == key]
        timed = results(rows, row["link"], lambda rule: None).get(contender.name)
        cells = [
            contender.name,
            row["link"],
            f"{row['seconds']:.0f}",
            f"{timed.total():.0f}" if timed else "",
        ]
        cells += [f"{row['loss']:.4f}", f"{same[0]:.4f}" if same else "", f"{row['bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def rates(rows: Sequence[Row], best: Callable[[str | None], float | None]) -> list[str]:
    """The search: mean loss on the small model, by learning rate."""
    searched = [row for row in rows if row["kind"] == "loss" and row["size"] == "tiny"]
    tried = sorted({row["lr"] for row in searched})
    lines = [
        "| rule | " + " | ".join(f"{rate:g}" for rate in tried) + " | best |",
        "|---" * (len(tried) + 2) + "|",
    ]
    for rule in dict.fromkeys(row["rule"] for row in searched):
        losses = [[r["loss"] for r in searched if (r["rule"], r["lr"]) == (rule, rate)] for rate in tried]
        means = " | ".join(f"{statistics.mean(one):.3f}" if one else "" for one in losses)
        lines.append(f"| `{rule}` | {means} | {best(rule):g} |")
    return lines


def write() -> None:
    import figure
    import measure

    rows = measure.read()
    links = [
        link for link in ("20mbit", "50mbit", "100mbit", "1gbit") if any(r.get("link") == link for r in rows)
    ]
    parts = [(HERE / "preface.md").read_text().strip()] if (HERE / "preface.md").exists() else []
    for link in links:
        found = results(rows, link, measure.best_rate)
        if DDP in found and FLOOR in found:
            parts.append("\n".join([f"## {link}", "", *table(found)]))
    parts.append("\n".join(["## Real runs", "", *checks(rows)]))
    parts.append("\n".join(["## Learning rates", "", *rates(rows, measure.best_rate)]))
    folder = measure.RESULTS.resolve().parent
    (folder / "log.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))
    found = results(rows, "50mbit", measure.best_rate)
    if DDP in found and FLOOR in found and found[DDP].curves:
        drawn = figure.PICTURE if folder == HERE else folder / figure.PICTURE.name
        drawn.write_text(figure.picture(found))
