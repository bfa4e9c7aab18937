"""`offbeat train`"""

import importlib.util
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from offbeat.app.cli import options, show
from offbeat.app.cli.options import Refused, reading
from offbeat.app.cli.report import show_table
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import MOST, Setting, check
from offbeat.app.runs.summary import read, summarize
from offbeat.app.runs.worker import work
from offbeat.base.checks import check_whole
from offbeat.base.errors import BadArgument


def train(
    method: Annotated[str, typer.Argument(help="The method, such as 'diloco(every=32)'.")],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: Annotated[int | None, typer.Option(help="Number of workers, 4 by default.")] = None,
    steps: options.Steps = 400,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seed: options.Seed = 0,
    evaluations: options.Evaluations = 10,
    link: options.Link = None,
    straggler: options.Straggler = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs and checkpoints; runs/... by default.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 for none.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --checkpoint-dir.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard files into the folder.")
    ] = False,
    json: options.Json = False,
) -> int:
    """Train with one method.

    Starts local workers, or joins the workers that torchrun started. Every rank writes a log of JSON lines.
    Ctrl-C saves a checkpoint and stops. A run continued with --resume equals an uninterrupted run bit for
    bit.

    Examples:

        offbeat train 'diloco(every=32)' --workers 4 --steps 500

        offbeat train 'local_sgd(every=8, delay=4)' --task bytes --data poems.txt --link 100mbit,20ms

        offbeat train 'diloco(every=32)' --checkpoint-dir runs/mine --resume

        torchrun --nproc-per-node 4 -m offbeat train 'qsr(alpha=0.02)' --task images --data cifar10.zip
    """
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    leads = not torchrun or os.environ["RANK"] == "0"  # prints, and writes the folder
    with reading():
        workers = _count_workers(workers, int(os.environ["WORLD_SIZE"]) if torchrun else None)
        if torchrun:
            dist.init_process_group("gloo")
        check_whole("checkpoint_every", checkpoint_every, 0, MOST["checkpoint_every"])
        if resume and checkpoint_dir is None:
            raise Refused("--resume: name the run's folder with --checkpoint-dir.")
        place = checkpoint_dir or Path("runs") / f"{folders.slug(method)}-{_start_time(torchrun)}"
        setting = Setting(
            method=method, task=task, model=model, data=data, workers=workers, steps=steps, batch=batch,
            lr=lr, optimizer=optimizer, seed=seed, evaluations=evaluations, link=link,
            straggler=tuple(straggler or ()), checkpoint_every=checkpoint_every or None,
        )  # fmt: skip
        _prepare(place, setting, resume=resume, leads=leads)
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise Refused("--tensorboard: TensorBoard is not installed: pip install tensorboard")
    with show.follow_progress([place]) if leads else nullcontext():
        finished = _join(place, resume=resume) if torchrun else launch([place], resume=resume)
    if not leads:
        return 0 if finished else 130
    if tensorboard:
        _write_tensorboard(place)
    if not finished:
        saved = folders.CheckpointStore(place / "checkpoints", rank=0, workers=workers).steps()
        where = f"the last checkpoint is at step {saved[-1]}" if saved else "there is no checkpoint yet"
        print(f"offbeat: stopped; {where}: continue with --checkpoint-dir {place} --resume", file=sys.stderr)
        return 130
    run = read(place)
    if json:
        show.print_json(asdict(summarize([run])[0]))
    else:
        title = f"{run.setting.task}, {show.count(workers, 'worker')}, {show.count(steps, 'step')}"
        show_table([run], title)
        show.console().print(f"logs and checkpoints: {place}", soft_wrap=True, markup=False)
    return 0


def _count_workers(given: int | None, started: int | None) -> int:
    """The number of workers: as given, or as many as torchrun has started."""
    if started is not None and given not in (None, started):
        reason = f"torchrun has started {show.count(started, 'worker')}; leave this option out."
        raise BadArgument("workers", given, reason)
    return started or (4 if given is None else given)


def _start_time(torchrun: bool) -> str:
    """Under torchrun, the time of rank 0: the clocks of ranks differ."""
    digits = torch.tensor(int(time.strftime("%Y%m%d%H%M%S")))
    if torchrun:
        dist.broadcast(digits, src=0)
    return "{}-{:06}".format(*divmod(int(digits), 10**6))


def _prepare(place: Path, setting: Setting, *, resume: bool, leads: bool) -> None:
    """Check the run and write its setting. To resume, the setting must be the same as before."""
    task = setting.find_task(folders.cache_of(place))
    full = check(setting, task)
    exists = (place / folders.SETTING).exists()
    if resume and not exists:
        raise Refused(f"--resume: there is no run in {str(place)!r}.")
    if resume:
        before = asdict(folders.setting_of(place))
        if changed := [name for name, value in asdict(full).items() if value != before[name]]:
            values = ", ".join(f"{name} was {before[name]!r}" for name in changed)
            raise Refused(f"--resume: the run in {str(place)!r} has another setting: {values}.")
    elif exists and leads:
        raise Refused(f"There is a run in {str(place)!r} already: add --resume, or name another folder.")
    if leads:
        folders.prepare(place, full, task)


def _join(place: Path, *, resume: bool) -> bool:
    """Train as one of torchrun's workers, once rank 0 has written the setting."""
    deadline = time.monotonic() + 60
    while not (place / folders.SETTING).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        return work([place], resume=resume)
    finally:
        dist.destroy_process_group()


def _write_tensorboard(place: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for rank, entries in enumerate(read(place).ranks):
        with SummaryWriter(str(place / "tensorboard" / f"rank-{rank}")) as writer:
            for entry in entries:
                for key, value in entry.items():
                    if isinstance(value, int | float) and key != "step":
                        writer.add_scalar(f"{entry['kind']}/{key}", value, entry["step"], walltime=entry["t"])
