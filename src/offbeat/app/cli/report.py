"""`offbeat report`"""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from offbeat.app.cli import options
from offbeat.app.cli.waiting import waiting


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain them.")],
    to_loss: options.ToLoss = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Print the tables and write the report of earlier runs, from their logs.

    The report is one HTML file that needs no network. It shows where the time went on each rank, how the loss
    fell over time, data and bytes, and the exact commands and versions. Runs of different tasks, clusters or
    lengths are not compared with each other: each group has its own table and its own part of the page.

    Examples:

        offbeat report runs/compare-20260101-120000

        offbeat report runs/one runs/other --to-loss 1.5 --out both.html --json
    """
    given = SimpleNamespace(**locals())
    with waiting("loading torch", quiet=quiet):
        from offbeat.app.commands.report import run

    return run(given)
