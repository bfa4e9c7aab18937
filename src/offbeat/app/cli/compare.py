"""`offbeat compare`"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offbeat.app.cli import options, show
from offbeat.app.cli.monitor import Monitor
from offbeat.app.cli.refusal import Refused, reading
from offbeat.app.cli.result import caption, columns, rows
from offbeat.app.report.page import write_page
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import Setting, Where, check
from offbeat.app.runs.summary import read, summarize
from offbeat.base.checks import check_whole
from offbeat.base.units import parse_seconds
from offbeat.lab import unavailable
from offbeat.tasks import Task


def compare(
    methods: Annotated[
        list[str], typer.Argument(help="Methods as expressions; torch_ddp is torch's own DDP.")
    ],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: options.Workers = 4,
    steps: options.Steps = 400,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seeds: Annotated[int, typer.Option(help="Runs of each method, with seeds 0, 1, ...")] = 1,
    evaluations: options.Evaluations = 10,
    link: options.Link = None,
    netns: options.Netns = False,
    simulate: options.Simulate = False,
    compute: options.Compute = "20ms",
    straggler: options.Straggler = None,
    out: options.Out = None,
    json: options.Json = False,
) -> int:
    """Train by several methods on the same model, data, seeds and number of samples, side by side.

    Prints the table and writes report.html. Loss and accuracy are on held-out data, after the last step;
    seconds, bytes and rounds are those of training alone. `exposed` is the time a worker stood still for
    messages, `hidden` the time they were in the air behind its work. `s to ref. loss` is the time until the
    loss is within 5 % of the last one of the reference: torch_ddp if it takes part, else ddp, else the
    first method. The same --out again runs only what is missing.

    Examples:

        offbeat compare torch_ddp 'local_sgd(every=8)' 'diloco(every=32)' --link 100mbit

        offbeat compare ddp 'cocod(every=8, delay=4)' --task bytes --seeds 3 --straggler share=0.1,delay=200ms

        sudo offbeat compare torch_ddp 'local_sgd(every=16)' --link 50mbit --netns

        offbeat compare ddp 'slowmo(every=12)' --workers 16 --simulate --compute 50ms --link 1gbit,5ms
    """
    with reading():
        if netns and simulate:
            raise Refused("--netns and --simulate exclude each other.")
        if netns and (reason := unavailable()):
            raise Refused(f"--netns: {reason}")
        check_whole("seeds", seeds, 1, 1000)
        where: Where = "netns" if netns else "simulation" if simulate else "processes"
        first = Setting(
            method=methods[0], task=task, model=model, data=data, workers=workers, steps=steps, batch=batch,
            lr=lr, optimizer=optimizer, evaluations=evaluations, link=link,
            straggler=tuple(straggler or ()), where=where, compute=parse_seconds(compute, "compute"),
        )  # fmt: skip
        place = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        found = prepared(place, first, list(dict.fromkeys(methods)), range(seeds))
    missing = [folder for folder in found if not folders.finished(folder)]
    if missing:
        with Monitor(missing, Console(stderr=True)):
            if not _launched(missing):
                print(
                    f"offbeat: stopped; the same command with --out {place} runs what is missing",
                    file=sys.stderr,
                )
                return 130
    return told(found, place / "report.html", json=json)


def _launched(missing: list[Path]) -> bool:
    """False if Ctrl-C came first, also where it ends the workers at once."""
    try:
        return launch(missing, resume=True)
    except KeyboardInterrupt:
        return False


def prepared(place: Path, first: Setting, methods: list[str], seeds: range) -> list[Path]:
    """A folder for every run, with everything checked before the first begins."""
    found: dict[Path, tuple[Setting, Task]] = {}
    for seed in seeds:
        for method in methods:
            setting = replace(first, method=method, seed=seed)
            task = setting.find_task(folders.cache_of(place / "any"))
            full = setting.filled(task)
            if seed == seeds[0]:
                check(setting, task)
            folder = place / f"{methods.index(method):02d}-{folders.slug(full.method)}-seed{seed}"
            if (folder / folders.SETTING).exists() and folders.setting_of(folder) != full:
                raise Refused(f"--out {str(place)!r}: another comparison is there; name another folder.")
            found[folder] = full, task
    for folder, (full, task) in found.items():
        begin(folder, full, task)
    return list(found)


def begin(folder: Path, setting: Setting, task: Task) -> None:
    """Write down what the run is, unless that has been done."""
    if not (folder / folders.SETTING).exists():
        parameters = sum(p.numel() for p in task.model().parameters())
        command = ["offbeat", *sys.argv[1:]]
        folders.prepare(folder, setting, command=command, unit=task.unit, parameters=parameters)


def told(found: list[Path], page: Path, *, json: bool) -> int:
    """The table of these runs, and their page."""
    runs = [read(folder) for folder in found]
    write_page(runs, page)
    if json:
        show.as_json([show.plain(row) for row in summarize(runs)])
        return 0
    console = show.console()
    show.print_table(console, caption(runs), columns(runs), rows(runs))
    console.print(f"the page: {page}", soft_wrap=True)
    return 0
