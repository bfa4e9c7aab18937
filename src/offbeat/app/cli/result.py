"""The table of runs, from their logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from offbeat.app.cli import show
from offbeat.app.report.page import write_page
from offbeat.app.runs.summary import Logged, Row, read, reference_of, summarize

OPTIONAL = ("accuracy", "MB on the wire")  # columns that are left out if they are empty


def show_runs(folders: Sequence[Path], page: Path, *, json: bool) -> int:
    """Write the page of these runs, and print their table."""
    runs = [read(folder) for folder in folders]
    write_page(runs, page)
    if json:
        show.print_json([asdict(row) for row in summarize(runs)])
    else:
        show_table(runs, caption(runs), f"report: {page}")
    return 0


def show_table(runs: Sequence[Logged], title: str, note: str) -> None:
    """Print the table of these runs, and a note below it."""
    cells = [_format(row) for row in summarize(runs)]
    headings = [name for name in HEADINGS if name not in OPTIONAL or any(row[name] for row in cells)]
    columns = {name: "fold" if name == "method" else "right" for name in headings}
    console = show.console()
    show.print_table(console, title, columns, [[row[name] for name in headings] for row in cells])
    console.print(note, soft_wrap=True)


def caption(runs: Sequence[Logged]) -> str:
    """The title of the table: what was trained, where, and the reference."""
    done = [run for run in runs if run.complete]
    setting = (done or runs)[0].setting
    workers = _counts({run.setting.workers for run in done or runs}, "worker")
    steps = _counts({run.setting.steps for run in done or runs}, "step")
    place = {"netns": "shaped links", "simulation": "simulated", "processes": "emulated link"}[setting.where]
    link = f", {setting.link} ({place})" if setting.link else ""
    seeds = len({run.setting.seed for run in done})
    words = f"{setting.task}, {workers}, {steps}{link}, {show.count(seeds, 'seed')}"
    left = f"; unfinished and left out: {len(runs) - len(done)}" if len(done) < len(runs) else ""
    return f"{words}; the reference is {reference_of(runs)}{left}"


def _counts(numbers: set[int], noun: str) -> str:
    *first, last = sorted(numbers)
    return ", ".join([*map(str, first), show.count(last, noun)])


HEADINGS = (
    "method", "loss", "accuracy", "seconds", "exposed s", "hidden s", "MB/worker", "rounds", "MB on the wire",
    "s to ref. loss", "speed-up",
)  # fmt: skip


def _format(row: Row) -> dict[str, str]:
    spread = "" if row.spread is None else f" ± {row.spread:.4f}"
    cells = [
        row.method,
        f"{row.loss:.4f}{spread}",
        "" if row.accuracy is None else f"{row.accuracy:.1%}",
        f"{row.seconds:.2f}",
        f"{row.exposed:.2f}",
        f"{row.hidden:.2f}",
        f"{row.megabytes:.2f}",
        f"{row.rounds:g}",
        "" if row.kernel_megabytes is None else f"{row.kernel_megabytes:.2f}",
        "never" if row.reached is None else f"{row.reached:.2f}",
        "" if row.speedup is None else f"{row.speedup:.2f}×",
    ]
    return dict(zip(HEADINGS, cells, strict=True))
