"""`offbeat report`, and the table of runs that other commands print, too."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.cli import options, show
from offbeat.app.cli.options import reading
from offbeat.app.report.page import write_page
from offbeat.app.runs.folder import find, setting_of
from offbeat.app.runs.summary import Logged, Row, read, reference_of, summarize
from offbeat.base.errors import BadArgument

HEADINGS = (
    "method", "loss", "accuracy", "seconds", "exposed s", "hidden s", "MB/worker", "rounds", "MB on the wire",
    "s to ref. loss", "speed-up",
)  # fmt: skip
OPTIONAL = ("accuracy", "MB on the wire")  # columns that are left out if they are empty


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain them.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    json: options.Json = False,
) -> None:
    """Print the table and write the report of earlier runs, from their logs.

    The report is one HTML file that needs no network. It shows where the time went on each rank, how the loss
    fell over time, data and bytes, and the exact commands and versions.

    Examples:

        offbeat report runs/compare-20260101-120000

        offbeat report runs/one runs/other --out both.html --json
    """
    with reading():
        if out.is_dir():
            raise BadArgument("out", str(out), "this is a folder; name an HTML file.")
        folders = find(runs)
        for folder in folders:
            setting_of(folder)
    show_runs(folders, out, json=json)


def show_runs(folders: Sequence[Path], page: Path, *, json: bool) -> None:
    """Write the page of these runs, and print their table."""
    runs = [read(folder) for folder in folders]
    write_page(runs, page)
    if json:
        show.print_json([asdict(row) for row in summarize(runs)])
    else:
        show_table(runs, caption(runs), f"report: {page}")


def show_table(runs: Sequence[Logged], title: str, note: str) -> None:
    """Print the table of these runs, without empty optional columns, and a note below it."""
    rows = [dict(zip(HEADINGS, _format(row), strict=True)) for row in summarize(runs)]
    columns = {
        name: "fold" if name == "method" else "right"
        for name in HEADINGS
        if name not in OPTIONAL or any(row[name] for row in rows)
    }
    console = show.console()
    show.print_table(console, title, columns, [[row[name] for name in columns] for row in rows])
    console.print(note, soft_wrap=True)


def caption(runs: Sequence[Logged]) -> str:
    """The title of the table: what was trained, where, and the reference."""
    done = [run for run in runs if run.complete]
    settings = [run.setting for run in done or runs]
    place = {"netns": "shaped links", "simulation": "simulated", "processes": "emulated link"}
    words = [settings[0].task]
    for noun in ("worker", "step"):
        *few, most = sorted({getattr(setting, f"{noun}s") for setting in settings})
        words += [*map(str, few), show.count(most, noun)]
    if settings[0].link:
        words.append(f"{settings[0].link} ({place[settings[0].where]})")
    words.append(show.count(len({run.setting.seed for run in done}), "seed"))
    left = f"; unfinished and left out: {len(runs) - len(done)}" if len(done) < len(runs) else ""
    return f"{', '.join(words)}; the reference is {reference_of(runs)}{left}"


def _format(row: Row) -> list[str]:
    spread = "" if row.spread is None else f" ± {row.spread:.4f}"
    return [
        row.method, f"{row.loss:.4f}{spread}", "" if row.accuracy is None else f"{row.accuracy:.1%}",
        *[f"{value:.2f}" for value in (row.seconds, row.exposed, row.hidden, row.megabytes)],
        f"{row.rounds:g}", "" if row.kernel_megabytes is None else f"{row.kernel_megabytes:.2f}",
        "never" if row.reached is None else f"{row.reached:.2f}",
        "" if row.speedup is None else f"{row.speedup:.2f}×",
    ]  # fmt: skip
