"""`offbeat report`"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.cli import options
from offbeat.app.cli.compare import told
from offbeat.app.cli.refusal import Refused, reading
from offbeat.app.runs.folder import find, setting_of


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    json: options.Json = False,
) -> int:
    """The table and the page of runs that have been made, computed anew from their logs.

    The page is one file and needs no network. It says where the time went, rank by rank, how the loss fell
    with time, data and bytes, and the exact commands and versions.

    Examples:

        offbeat report runs/compare-20260101-120000

        offbeat report runs/one runs/other --out both.html --json
    """
    with reading():
        if out.is_dir():
            raise Refused(f"--out {str(out)!r}: this is a folder; name the page to write.")
        found = find(runs)
        for folder in found:
            setting_of(folder)
    return told(found, out, json=json)
