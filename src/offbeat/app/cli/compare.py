"""`offbeat compare`"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.cli import options
from offbeat.app.cli.monitor import show_progress
from offbeat.app.cli.refusal import Refused, reading
from offbeat.app.cli.report import show_runs
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import Setting, check
from offbeat.base.checks import check_whole
from offbeat.base.units import parse_seconds
from offbeat.lab import unavailable


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
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seeds: Annotated[int, typer.Option(help="Run each method with this many seeds: 0, 1, ...")] = 1,
    evaluations: options.Evaluations = 10,
    link: options.Link = None,
    netns: options.Netns = False,
    simulate: options.Simulate = False,
    compute: options.Compute = "20ms",
    straggler: options.Straggler = None,
    out: options.Out = None,
    json: options.Json = False,
) -> int:
    """Train with several methods on the same model, data, seeds and samples, and compare them.

    Prints a table and writes report.html. Loss and accuracy are measured on held-out data after the last
    step. Seconds, bytes and rounds count only training. `exposed` is the time a worker stood still for
    messages; `hidden` is the time that messages were in the air while it worked. `s to ref. loss` is the time
    until the loss is within 5 % of the reference's final loss. The reference is torch_ddp if you name it,
    else ddp, else the first method. With an earlier --out, only the missing runs are made.

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
        first = Setting(
            method=methods[0], task=task, model=model, data=data, workers=workers, steps=steps, batch=batch,
            lr=lr, optimizer=optimizer, evaluations=evaluations, link=link, straggler=tuple(straggler or ()),
            where="netns" if netns else "simulation" if simulate else "processes",
            compute=parse_seconds(compute, "compute"),
        )  # fmt: skip
        place = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        found = _prepare(place, first, list(dict.fromkeys(methods)), seeds)
    missing = [folder for folder in found if not folders.finished(folder)]
    if missing:
        with show_progress(missing):
            try:
                finished = launch(missing, resume=True)
            except KeyboardInterrupt:
                finished = False
        if not finished:
            print(f"offbeat: stopped; to run the rest, repeat with --out {place}", file=sys.stderr)
            return 130
    return show_runs(found, place / "report.html", json=json)


def _prepare(place: Path, first: Setting, methods: list[str], seeds: int) -> list[Path]:
    """A folder for every run. Everything is checked before anything is written."""
    runs = {}
    for seed in range(seeds):
        for number, method in enumerate(methods):
            setting = replace(first, method=method, seed=seed)
            task = setting.find_task(folders.cache_of(place / "any"))
            full = check(setting, task) if seed == 0 else setting.fill(task)
            runs[f"{number:02d}-{folders.slug(full.method)}-seed{seed}"] = full, task
    return folders.prepare_all(place, runs)
