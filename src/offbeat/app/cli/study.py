"""`offbeat study`"""

import statistics
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from offbeat.app.cli import options, show
from offbeat.app.cli.refusal import reading
from offbeat.app.report.page import Curve, write_page
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import MOST, Setting, check
from offbeat.app.runs.summary import Logged, read
from offbeat.base.checks import check_whole
from offbeat.base.errors import BadArgument
from offbeat.methods.expression import method
from offbeat.tasks import Task


def study(
    methods: Annotated[list[str], typer.Argument(help="Methods; those that take every= get each period.")],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,4,8",
    every: Annotated[str, typer.Option(help="Periods, separated by commas.")] = "1,4,16,64",
    samples: Annotated[int, typer.Option(help="Samples of each run, over all of its workers.")] = 20_000,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> int:
    """Simulate a grid of methods, workers and periods: what does less communication cost?

    All runs train on the same number of samples. Prints a table and writes report.html, which plots accuracy
    against communication. Repeat the command to continue after Ctrl-C.

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
        counts = _parse_list("workers", workers, MOST["workers"])
        cells = _cells(first, found, methods, counts, _parse_list("every", every, MOST["steps"]), samples)
        runs = {name: (check(cell.setting, found), found) for name, cell in cells.items()}
        prepared = folders.prepare_all(place, runs)
    missing = [folder for folder in prepared if not folders.finished(folder)]
    console = Console(stderr=True)
    try:
        for folder in track(missing, "runs", console=console, disable=not console.is_terminal):
            launch([folder])
    except KeyboardInterrupt:
        print("offbeat: stopped; repeat the command to run the rest", file=sys.stderr)
        return 130
    _show([*cells.values()], [read(folder) for folder in prepared], place / "report.html", json=json)
    return 0


def _parse_list(name: str, text: str, most: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument(name, text, "must be whole numbers, separated by commas.") from None
    for number in numbers:
        check_whole(name, number, 1, most)
    return numbers


class Cell(NamedTuple):
    """One run of the grid."""

    setting: Setting
    method: str  # as given, without its period
    every: int | None


def _cells(
    first: Setting, task: Task, methods: list[str], workers: list[int], periods: list[int], samples: int
) -> dict[str, Cell]:
    """All runs of the grid by name. The steps of each follow from the number of samples."""
    batch = first.batch or task.batch_size
    cells = {}
    for given, count, every in product(methods, workers, periods):
        steps = samples // (count * batch)
        if steps < 1:
            reason = f"one step of {count} workers with batches of {batch} needs {count * batch}."
            raise BadArgument("samples", samples, reason)
        varied = with_period(given, every)
        setting = replace(first, method=varied or given, workers=count, steps=steps).fill(task)
        name = f"{folders.slug(setting.method)}-workers{count}"
        cells[name] = Cell(setting, given, every if varied else None)
    return cells


def with_period(expression: str, every: int) -> str | None:
    """The method with this period; None if it does not take one.

    >>> with_period("slowmo(momentum=0.5)", 8)
    'slowmo(momentum=0.5, every=8)'
    """
    call = method(expression)
    return str(call.but(every=every)) if call.takes("every") else None


def _show(cells: list[Cell], runs: list[Logged], page: Path, *, json: bool) -> None:
    """Write the page and print the table."""
    rows: list[dict[str, Any]] = [
        {
            "method": cell.method,
            "workers": cell.setting.workers,
            "every": cell.every,
            "steps": cell.setting.steps,
            "loss": run.evals[-1]["loss"],
            "accuracy": run.evals[-1].get("accuracy"),
            "rounds": run.ends[0]["rounds"],
            "megabytes": statistics.mean(end["sent"] for end in run.ends) / 1e6,
        }
        for cell, run in zip(cells, runs, strict=True)
    ]
    write_page(runs, page, curves=_curves(rows))
    if json:
        show.print_json(rows)
        return
    columns = {"method": "fold", **dict.fromkeys(list(rows[0])[1:], "right")}
    formats = {"loss": "{:.4f}", "accuracy": "{:.1%}", "megabytes": "{:.2f}"}
    table = [
        ["" if value is None else formats.get(name, "{}").format(value) for name, value in row.items()]
        for row in rows
    ]
    console = show.console()
    show.print_table(console, f"{runs[0].setting.task}, the same samples for all", columns, table)
    console.print(f"report: {page}", soft_wrap=True)


def _curves(rows: list[dict[str, Any]]) -> list[Curve]:
    """One curve per method and number of workers, with a point per period."""
    curves: dict[str, list[list[Any]]] = {}
    for row in rows:
        point = [row["megabytes"], row["loss"], row["accuracy"], row["every"]]
        curves.setdefault(f"{row['method']}, {show.count(row['workers'], 'worker')}", []).append(point)
    return [{"name": name, "points": sorted(points)} for name, points in curves.items()]
