"""`offbeat compare` and `offbeat study`"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from offbeat.app.cli import options, show
from offbeat.app.cli.options import Refused, reading
from offbeat.app.cli.report import show_runs
from offbeat.app.report.page import write_page
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import MOST, Setting, check
from offbeat.app.runs.summary import Logged, read
from offbeat.base.checks import check_number, check_whole
from offbeat.base.errors import BadArgument
from offbeat.base.units import parse_seconds
from offbeat.lab import unavailable
from offbeat.methods.expression import method as read_method
from offbeat.tasks import Task


def compare(
    methods: Annotated[
        list[str], typer.Argument(help="Methods, such as 'diloco(every=32)'; torch_ddp is torch's own DDP.")
    ],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: options.Workers = 4,
    steps: options.Steps = 400,
    batch: options.Batch = None,
    lr: Annotated[
        str | None,
        typer.Option(help="Peak learning rate, or several: 0.1,0.3,1. Each method is shown at its best."),
    ] = None,
    optimizer: options.Optimizer = None,
    seeds: Annotated[int, typer.Option(help="Run each method with this many seeds: 0, 1, ...")] = 1,
    evaluations: options.Evaluations = 10,
    to_loss: options.ToLoss = None,
    link: options.Link = None,
    netns: options.Netns = False,
    simulate: options.Simulate = False,
    compute: options.Compute = None,
    straggler: options.Straggler = None,
    out: options.Out = None,
    json: options.Json = False,
) -> int:
    """Train with several methods on the same model, data, seeds and samples, and compare them.

    Prints a table and writes report.html. Loss and accuracy are measured on held-out data after the last
    step. Seconds, bytes and rounds count only training. `exposed` is the time a worker stood still for
    messages; `hidden` is the time that messages were in the air while it worked. `s to ref. loss` is the time
    until the loss is within 5 % of the reference's final loss with the same seed, or with --to-loss until it
    is at most the given one. The reference is torch_ddp if you name it, else ddp, else the first method. With
    several rates, every method runs at each of them, and the table shows the one with the lowest final loss.
    With an earlier --out, only the missing runs are made.

    Examples:

        offbeat compare torch_ddp 'local_sgd(every=8)' 'diloco(every=32)' --link 100mbit

        offbeat compare ddp 'local_sgd(every=8, delay=4)' --simulate --lr 0.05,0.1,0.2 --to-loss 0.2

        offbeat compare ddp 'cocod(every=8, delay=4)' --task bytes --seeds 3 --straggler share=0.1,delay=200ms

        sudo offbeat compare torch_ddp 'local_sgd(every=16)' --link 50mbit --netns

        offbeat compare ddp 'slowmo(every=12)' --workers 16 --simulate --compute 50ms --link 1gbit,5ms
    """
    with reading():
        if netns and simulate:
            raise Refused("--netns and --simulate exclude each other.")
        if compute is not None and not simulate:
            raise Refused("--compute needs --simulate: real steps take the time that they take.")
        if netns and (reason := unavailable()):
            raise Refused(f"--netns: {reason}")
        check_whole("seeds", seeds, 1, 1000)
        options.check_loss(to_loss)
        rates = [None] if lr is None else _parse_rates(lr)
        first = Setting(
            method=methods[0], task=task, model=model, data=data, workers=workers, steps=steps, batch=batch,
            lr=rates[0], optimizer=optimizer, evaluations=evaluations, link=link,
            straggler=tuple(straggler or ()),
            where="netns" if netns else "simulation" if simulate else "processes",
            compute=parse_seconds("20ms" if compute is None else compute, "compute"),
        )  # fmt: skip
        place = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        runs = _runs(first, list(dict.fromkeys(methods)), rates, seeds, place)
        prepared = folders.prepare_all(place, runs)
    missing = [folder for folder in prepared if not folders.finished(folder)]
    if len(rates) > 1:
        _announce(len(prepared), len(missing), len(rates), seeds)
    if missing:
        with show.follow_progress(missing):
            try:
                finished = launch(missing, resume=True)
            except KeyboardInterrupt:
                finished = False
        if not finished:
            print(f"offbeat: stopped; to run the rest, repeat with --out {place}", file=sys.stderr)
            return 130
    show_runs(prepared, place / "report.html", to_loss=to_loss, json=json)
    return 0


def _runs(
    first: Setting, methods: Sequence[str], rates: Sequence[float | None], seeds: int, place: Path
) -> dict[str, tuple[Setting, Task]]:
    """By name, each run with its task. All are checked before anything is written."""
    runs = {}
    for seed in range(seeds):
        found = replace(first, seed=seed).find_task(folders.cache_of(place / "any"))
        for (number, method), lr in product(enumerate(methods), rates):
            setting = replace(first, method=method, seed=seed, lr=lr)
            full = check(setting, found) if seed == 0 and lr == rates[0] else setting.fill(found)
            rate = f"-lr{lr!r}" if len(rates) > 1 else ""
            runs[f"{number:02d}-{folders.slug(full.method)}{rate}-seed{seed}"] = full, found
    return runs


def _announce(runs: int, missing: int, rates: int, seeds: int) -> None:
    """Say how many runs a search takes before they start."""
    factors = [show.count(runs // (rates * seeds), "method"), show.count(rates, "rate")]
    factors += [show.count(seeds, "seed")] if seeds > 1 else []
    done = f"; {runs - missing} of them are done" if missing < runs else ""
    print(f"offbeat: {show.count(runs, 'run')}: {' × '.join(factors)}{done}", file=sys.stderr)


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
        runs = {name: (check(setting, found), found) for name, (setting, *_) in cells.items()}
        prepared = folders.prepare_all(place, runs)
    missing = [folder for folder in prepared if not folders.finished(folder)]
    console = Console(stderr=True)
    try:
        for folder in track(missing, "runs", console=console, disable=not console.is_terminal):
            launch([folder])
    except KeyboardInterrupt:
        print("offbeat: stopped; repeat the command to run the rest", file=sys.stderr)
        return 130
    logged = [read(folder) for folder in prepared]
    given = [(method, every) for _, method, every in cells.values()]
    _show(given, logged, place / "report.html", json=json)
    return 0


def _parse_rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument("lr", text, "must be a number, or several separated by commas.") from None
    for rate in rates:
        check_number("lr", rate, 1e6)
    return list(dict.fromkeys(rates))


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
    cells = {}
    for given, count, every in product(methods, workers, periods):
        steps = samples // (count * batch)
        if steps < 1:
            reason = f"one step of {count} workers with batches of {batch} needs {count * batch}."
            raise BadArgument("samples", samples, reason)
        varied = with_period(given, every)
        setting = replace(first, method=varied or given, workers=count, steps=steps).fill(task)
        name = f"{folders.slug(setting.method)}-workers{count}"
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
    write_page(runs, page, curves=[{"name": name, "points": sorted(curves[name])} for name in curves])
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
