"""The table of runs, from their logs."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.app.cli import show
from offbeat.app.runs.summary import Logged, Row, reference_of, summarize


def columns(runs: Sequence[Logged]) -> dict[str, str]:
    """Headings, with those that have something to say."""
    names = {"method": "fold", "loss": "right"}
    found = summarize(runs)
    if any(row.accuracy is not None for row in found):
        names["accuracy"] = "right"
    names |= dict.fromkeys(["seconds", "exposed s", "hidden s", "MB/worker", "rounds"], "right")
    if any(row.kernel_megabytes is not None for row in found):
        names["MB on the wire"] = "right"
    return names | {"s to ref. loss": "right", "speed-up": "right"}


def rows(runs: Sequence[Logged]) -> list[list[str]]:
    wanted, found = columns(runs), summarize(runs)
    return [[_cells(row)[name] for name in wanted] for row in found]


def caption(runs: Sequence[Logged]) -> str:
    """What the figures are of."""
    done = [run for run in runs if run.complete]
    setting = (done or runs)[0].setting
    workers = _some({run.setting.workers for run in done or runs}, "worker")
    steps = _some({run.setting.steps for run in done or runs}, "step")
    place = {"netns": "shaped links", "simulation": "simulated", "processes": "emulated link"}[setting.where]
    link = f", {setting.link} ({place})" if setting.link else ""
    seeds = len({run.setting.seed for run in done})
    words = f"{setting.task}, {workers}, {steps}{link}, {show.some(seeds, 'seed')}"
    left = f"; unfinished and left out: {len(runs) - len(done)}" if len(done) < len(runs) else ""
    return f"{words}; the reference is {reference_of(runs)}{left}"


def _some(counts: set[int], noun: str) -> str:
    *first, last = sorted(counts)
    return ", ".join([*map(str, first), show.some(last, noun)])


def _cells(row: Row) -> dict[str, str]:
    spread = "" if row.spread is None else f" ± {row.spread:.4f}"
    wire = "" if row.kernel_megabytes is None else f"{row.kernel_megabytes:.2f}"
    return {
        "method": row.method,
        "loss": f"{row.loss:.4f}{spread}",
        "accuracy": "" if row.accuracy is None else f"{row.accuracy:.1%}",
        "seconds": f"{row.seconds:.2f}",
        "exposed s": f"{row.exposed:.2f}",
        "hidden s": f"{row.hidden:.2f}",
        "MB/worker": f"{row.megabytes:.2f}",
        "MB on the wire": wire,
        "rounds": f"{row.rounds:g}",
        "s to ref. loss": "never" if row.reached is None else f"{row.reached:.2f}",
        "speed-up": "" if row.speedup is None else f"{row.speedup:.2f}×",
    }
