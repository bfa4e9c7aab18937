"""A plan on the terminal, or as JSON."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.app.cli import show
from offbeat.app.cli.plan_measure import Found
from offbeat.base.units import as_bytes, as_rate, as_time
from offbeat.plan import Flat, Plan, Prediction
from offbeat.plan.draw import chart

HEADINGS = (
    "method", "rounds", "sent", "wall-clock", "±", "messages", "stragglers", "hidden", "busy", "copies",
    "ddp within 5 % from", "ddp as fast at",
)  # fmt: skip


def as_dict(plan: Plan, found: Found) -> dict[str, Any]:
    """The plan for JSON."""
    measured = None
    if found.step is not None:
        points = [{"bytes": b, "seconds": s} for b, s in found.points]
        measured = {**asdict(found.step), "link": points}
    return {
        "why": plan.why,
        "job": {**asdict(replace(plan.job, rate=Flat(0.0))), "rate": repr(plan.job.rate)},
        "cluster": repr(plan.cluster),
        "measured": measured,
        "predictions": [prediction.as_dict() for prediction in plan.predictions],
    }


def show_plan(console: Console, plan: Plan, found: Found, draw: Path | None) -> None:
    """Print the table, the reason and the chart."""
    if found.compute is not None and found.step is not None:
        times = sorted(time for row in found.compute.rows for time in row)
        text = f"Measured: the median step takes {as_time(times[len(times) // 2])}"
        if found.network is not None:
            text += f", the link carries {as_rate(min(found.network.links))}"
        console.print(text + f"; {show.count(found.step.parameters, 'parameter')}.", markup=False)
    columns = {heading: "fold" if heading == "method" else "right" for heading in HEADINGS}
    title = f"{show.count(plan.job.steps, 'step')} on {show.count(plan.cluster.workers, 'worker')}"
    show.print_table(console, title, columns, [_row(p) for p in plan.predictions])
    for prediction in plan.predictions:
        for note in prediction.notes:
            console.print(f"{prediction.method}: {note}.", markup=False)
    console.print("\n" + plan.why + "\n", markup=False)
    console.print("Wall-clock time against link bandwidth, both logarithmic:", markup=False)
    console.print(chart(plan, width=console.width), markup=False, soft_wrap=True)
    if draw is not None:
        console.print(f"\nPlot: {draw}", markup=False)


def _row(p: Prediction) -> list[str]:
    def link(bandwidth: float | None) -> str:
        return "-" if bandwidth is None else as_rate(bandwidth)

    return [
        p.method,
        f"{p.rounds:,}",
        as_bytes(p.bytes_sent),
        as_time(p.seconds),
        as_time(p.spread) if p.spread else "0",
        f"{p.exposed / p.seconds:.1%}",
        f"{p.waiting / p.seconds:.1%}",
        f"{p.hidden / max(1e-12, p.hidden + p.exposed):.0%}",
        f"{p.utilisation:.1%}",
        f"{p.copies:.1f}",
        link(p.break_even),
        link(p.ddp_needs),
    ]
