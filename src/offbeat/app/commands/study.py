"""`offbeat study`"""

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offbeat.app.cli import saying
from offbeat.app.cli.options import Refused, about, reading
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import show
from offbeat.app.commands.progress import track
from offbeat.app.report.page import write_page
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import MOST, Setting, check
from offbeat.app.runs.summary import Logged, read
from offbeat.app.runs.verdict import trade_off
from offbeat.base.checks import check_whole
from offbeat.base.errors import BadArgument
from offbeat.methods.expression import method as read_method
from offbeat.tasks import Task


def run(given: SimpleNamespace) -> int:
    """Make the runs of the grid that are missing, and show all of them."""
    with reading():
        place = given.out or Path("runs") / "study"
        check_whole("samples", given.samples, 1, 10**12)
        if given.batch is not None:
            check_whole("batch", given.batch, 1, MOST["batch"])
        first = Setting(
            method=given.methods[0], task=given.task, model=given.model, data=given.data, batch=given.batch,
            lr=given.lr, optimizer=given.optimizer, seed=given.seed, evaluations=1, where="simulation",
        )  # fmt: skip
        found = first.find_task(folders.cache_of(place / "any"))
        counts = _parse_list("workers", given.workers, MOST["workers"])
        periods = _parse_list("every", given.every, MOST["steps"])
        cells = _cells(first, found, given.methods, counts, periods, given.samples)
        runs = {}
        with waiting("checking the methods", quiet=given.quiet):
            for name, (setting, *_) in cells.items():
                with about(setting.method):
                    runs[name] = check(setting, found), found
    with ExitStack() as stack:
        with reading():
            stack.enter_context(folders.lock(place))
            prepared = _prepare(place, runs, given.out)
        stack.enter_context(saying("stopped; repeat the command to run the rest"))
        _launch(prepared, quiet=given.quiet, verbose=given.verbose)
    named = [(method, every) for _, method, every in cells.values()]
    _show(named, [read(folder) for folder in prepared], place / "report.html", json=given.json)
    return 0


def _prepare(place: Path, runs: Mapping[str, tuple[Setting, Task]], out: Path | None) -> list[Path]:
    try:
        return folders.prepare_all(place, runs)
    except BadArgument as error:
        if out is not None:
            raise
        reason = f"{str(place)!r} holds a study with other settings; name another folder with --out."
        raise Refused(reason) from error


def _launch(prepared: list[Path], *, quiet: bool, verbose: bool) -> None:
    """Make the runs that are missing."""
    missing = [folder for folder in prepared if not folders.finished(folder)]
    for folder in track(missing, "runs", quiet=quiet):
        launch([folder])
        if verbose:
            print(f"offbeat: {folder.name}: loss {read(folder).loss:.4f}", file=sys.stderr)


def _parse_list(name: str, text: str, most: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument(name, text, "must be whole numbers, separated by commas.") from None
    for number in numbers:
        check_whole(name, number, 1, most)
    return numbers


def _cells(
    first: Setting, task: Task, methods: list[str], workers: list[int], periods: list[int], samples: int
) -> dict[str, tuple[Setting, str, int | None]]:
    """By name, each run of the grid with its method as given, and its period if that takes one."""
    batch = first.batch or task.batch_size
    cells: dict[str, tuple[Setting, str, int | None]] = {}
    for given, count, every in product(methods, workers, periods):
        steps = samples // (count * batch)
        if steps < 1:
            reason = f"one step of {count} workers with batches of {batch} needs {count * batch}."
            raise BadArgument("samples", samples, reason)
        varied = with_period(given, every)
        setting = replace(first, method=varied or given, workers=count, steps=steps).fill(task)
        name = f"{folders.slug(setting.method)}-workers{count}"
        if name in cells and cells[name][1] != given:
            raise Refused(f"{given} makes the same runs as {cells[name][1]}: leave one out.")
        cells[name] = setting, given, every if varied else None
    return cells


def with_period(expression: str, every: int) -> str | None:
    """The method with this period; None if it does not take one.

    >>> with_period("slowmo(momentum=0.5)", 8)
    'slowmo(momentum=0.5, every=8)'
    """
    call = read_method(expression)
    return str(call.but(every=every)) if call.takes("every") else None


def _show(given: list[tuple[str, int | None]], runs: list[Logged], page: Path, *, json: bool) -> None:
    """Write the page, with a curve per method and number of workers, and print the table."""
    rows: list[dict[str, Any]] = []
    curves: dict[str, list[list[Any]]] = {}
    for (name, every), run in zip(given, runs, strict=True):
        workers, loss, accuracy = run.setting.workers, run.evals[-1]["loss"], run.evals[-1].get("accuracy")
        sent = statistics.mean(end["sent"] for end in run.ends) / 1e6
        row = {"method": name, "workers": workers, "every": every, "steps": run.setting.steps, "loss": loss}
        rows.append(row | {"accuracy": accuracy, "rounds": run.ends[0]["rounds"], "megabytes": sent})
        curve = curves.setdefault(f"{name}, {show.count(workers, 'worker')}", [])
        curve.append([sent, loss, accuracy, every])
    drawn = [{"name": name, "points": sorted(curves[name])} for name in curves]
    write_page(runs, page, curves=drawn)
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
    if sentence := trade_off(drawn):
        show.say(console, sentence)
    show.say(console, f"report: {page}")
