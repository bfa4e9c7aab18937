"""`offbeat report`"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.cli import options
from offbeat.app.cli.refusal import reading
from offbeat.app.cli.result import show_runs
from offbeat.app.runs.folder import find, setting_of
from offbeat.base.errors import BadArgument


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain them.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    json: options.Json = False,
) -> int:
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
    return show_runs(folders, out, json=json)
