"""A plan on the terminal, or as JSON."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.app.cli import show
from offbeat.app.cli.measured import Found
from offbeat.base.units import as_bytes, as_rate, as_time
from offbeat.plan import Flat, Plan, Prediction
from offbeat.plan.draw import chart


def as_dict(made: Plan, found: Found) -> dict[str, Any]:
    """For JSON."""
    measured = None
    if found.step is not None:
        points = [{"bytes": b, "seconds": s} for b, s in found.points]
        measured = {**asdict(found.step), "link": points}
    return {
        "why": made.why,
        "job": {**asdict(replace(made.job, rate=Flat(0.0))), "rate": repr(made.job.rate)},
        "cluster": repr(made.cluster),
        "measured": measured,
        "predictions": [prediction.as_dict() for prediction in made.predictions],
    }


def show_plan(console: Console, made: Plan, found: Found, draw: Path | None) -> None:
    """The table, the reason and the chart."""
    if found.compute is not None and found.step is not None:
        times = sorted(time for row in found.compute.rows for time in row)
        told = f"Measured: a step takes {as_time(times[len(times) // 2])} in the middle"
        if found.network is not None:
            told += f", the link carries {as_rate(min(found.network.links))}"
        console.print(told + f"; {show.some(found.step.parameters, 'parameter')}.", markup=False)
    columns = {
        "method": "fold",
        "rounds": "right",
        "sent": "right",
        "wall-clock": "right",
        "±": "right",
        "messages": "right",
        "stragglers": "right",
        "hidden": "right",
        "busy": "right",
        "copies": "right",
        "ddp within 5 % from": "right",
        "ddp as fast at": "right",
    }
    title = f"{show.some(made.job.steps, 'step')} on {show.some(made.cluster.workers, 'worker')}"
    show.print_table(console, title, columns, [_row(p) for p in made.predictions])
    for prediction in made.predictions:
        for note in prediction.notes:
            console.print(f"{prediction.method}: {note}.", markup=False)
    console.print("\n" + made.why + "\n", markup=False)
    console.print("Wall-clock against the link's bandwidth, both logarithmic:", markup=False)
    console.print(chart(made, width=console.width), markup=False, soft_wrap=True)
    if draw is not None:
        console.print(f"\nDrawn to {draw}.", markup=False)


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
