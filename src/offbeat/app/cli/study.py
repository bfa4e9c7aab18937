"""`offbeat study`"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from offbeat.app.cli import options, show
from offbeat.app.cli.compare import begin
from offbeat.app.cli.refusal import Refused, reading
from offbeat.app.report.page import Curve, write_page
from offbeat.app.runs import folder as folders
from offbeat.app.runs.grid import Cell, cells
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import MOST, Setting, check
from offbeat.app.runs.summary import Logged, read
from offbeat.base.checks import check_whole, replace_nonfinite
from offbeat.base.errors import BadArgument


def study(
    methods: Annotated[list[str], typer.Argument(help="Methods; those that take every= get each period.")],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "2,4,8",
    every: Annotated[str, typer.Option(help="Periods.")] = "1,4,16,64",
    samples: Annotated[int, typer.Option(help="Samples of all workers together, the same for all.")] = 20_000,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> int:
    """A grid of methods, workers and periods, in simulation on this machine: what seldom talking costs.

    Every run sees the same number of samples. Prints the table and writes report.html with the curves of
    accuracy against communication. The same command again goes on where it was ended.

    Examples:

        offbeat study local_sgd 'slowmo(momentum=0.5)' --workers 2,4,8 --every 1,4,16,64

        offbeat study ddp local_sgd diloco --task bytes --model tiny --samples 40000 --out runs/study
    """
    with reading():
        place = out or Path("runs") / "study"
        check_whole("samples", samples, 1, 10**12)
        if batch is not None:
            check_whole("batch", batch, 1, MOST["batch"])
        first = Setting(
            method=methods[0], task=task, model=model, data=data, batch=batch, lr=lr, optimizer=optimizer,
            seed=seed, evaluations=1, where="simulation",
        )  # fmt: skip
        found = first.find_task(folders.cache_of(place / "any"))
        wanted = cells(
            first, found, expressions=methods, workers=numbers("workers", workers, MOST["workers"]),
            periods=numbers("every", every, MOST["steps"]), samples=samples,
        )  # fmt: skip
        prepared: dict[Path, Setting] = {}
        for cell in wanted:
            check(cell.setting, found)
            full = cell.setting.filled(found)
            folder = place / f"{folders.slug(full.method)}-workers{full.workers}"
            if (folder / folders.SETTING).exists() and folders.setting_of(folder) != full:
                raise Refused(f"--out {str(place)!r}: another study is there; name another folder.")
            prepared[folder] = full
        for folder, full in prepared.items():
            begin(folder, full, found)
    missing = [folder for folder in prepared if not folders.finished(folder)]
    console = Console(stderr=True)
    try:
        for folder in track(missing, "runs", console=console, disable=not console.is_terminal):
            launch([folder])
    except KeyboardInterrupt:
        print("offbeat: stopped; the same command runs what is missing", file=sys.stderr)
        return 130
    runs = [read(folder) for folder in prepared]
    write_page(runs, place / "report.html", curves=curves(wanted, runs))
    return told(wanted, runs, place / "report.html", json=json)


def numbers(name: str, text: str, most: int) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument(name, text, "whole numbers with commas between them are needed.") from None
    if min(found) < 1:
        raise BadArgument(name, text, "at least 1 is needed.")
    if max(found) > most:
        raise BadArgument(name, text, f"at most {most} is possible.")
    return found


def figures(cell: Cell, run: Logged) -> dict[str, Any]:
    """One run of the grid, from its logs."""
    last, sent = run.evals[-1], sum(end["sent"] for end in run.ends) / len(run.ends)
    return {
        "method": cell.method,
        "workers": cell.setting.workers,
        "every": cell.every,
        "steps": cell.setting.steps,
        "loss": last["loss"],
        "accuracy": last.get("accuracy"),
        "rounds": run.ends[0]["rounds"],
        "megabytes": sent / 1e6,
    }


def curves(wanted: list[Cell], runs: list[Logged]) -> list[Curve]:
    """A curve per method and number of workers, along its periods."""
    found: dict[str, list[list[Any]]] = {}
    for cell, run in zip(wanted, runs, strict=True):
        row = figures(cell, run)
        point = [row["megabytes"], row["loss"], row["accuracy"], row["every"]]
        found.setdefault(f"{cell.method}, {show.some(cell.setting.workers, 'worker')}", []).append(point)
    return [{"name": name, "points": sorted(points)} for name, points in found.items()]


def told(wanted: list[Cell], runs: list[Logged], page: Path, *, json: bool) -> int:
    rows = [figures(cell, run) for cell, run in zip(wanted, runs, strict=True)]
    if json:
        show.as_json(replace_nonfinite(rows))
        return 0
    columns = {"method": "fold", **dict.fromkeys(list(rows[0])[1:], "right")}
    cells_ = [
        [
            row["method"],
            str(row["workers"]),
            "" if row["every"] is None else str(row["every"]),
            str(row["steps"]),
            f"{row['loss']:.4f}",
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
            str(row["rounds"]),
            f"{row['megabytes']:.2f}",
        ]
        for row in rows
    ]
    console = show.console()
    show.print_table(console, f"{runs[0].setting.task}, the same samples for all", columns, cells_)
    console.print(f"the page: {page}", soft_wrap=True)
    return 0
