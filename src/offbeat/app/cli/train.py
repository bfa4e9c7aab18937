"""`offbeat train`"""

import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offbeat.app.cli import options, show
from offbeat.app.cli.monitor import Monitor
from offbeat.app.cli.refusal import Refused, reading
from offbeat.app.cli.result import columns, rows
from offbeat.app.runs import folder as folders
from offbeat.app.runs.checkpoints import CheckpointStore
from offbeat.app.runs.launch import agreed, join, joined, launch
from offbeat.app.runs.setting import MOST, Setting, check
from offbeat.app.runs.summary import read, summarize
from offbeat.base.checks import check_whole


def train(
    method: Annotated[str, typer.Argument(help="The method as an expression, such as 'diloco(every=32)'.")],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: options.Workers = 4,
    steps: options.Steps = 400,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0,
    evaluations: options.Evaluations = 10,
    link: options.Link = None,
    straggler: options.Straggler = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="The run's folder: logs and checkpoints; runs/... by default.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 for none.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --checkpoint-dir, exactly.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write the run for TensorBoard, into its folder.")
    ] = False,
    json: options.Json = False,
) -> int:
    """Train with one method.

    Starts local workers, or joins those that torchrun has started. Every rank writes a log of JSON lines.
    Ctrl-C saves a checkpoint and ends; --resume goes on from it, to the bit.

    Examples:

        offbeat train 'diloco(every=32)' --workers 4 --steps 500

        offbeat train 'local_sgd(every=8, delay=4)' --task bytes --data poems.txt --link 100mbit,20ms

        offbeat train 'diloco(every=32)' --checkpoint-dir runs/mine --resume

        torchrun --nproc-per-node 4 -m offbeat train 'qsr(alpha=0.02)' --task images --data cifar10.zip
    """
    with reading():
        workers = int(os.environ["WORLD_SIZE"]) if joined() else workers
        check_whole("checkpoint_every", checkpoint_every, 0, MOST["checkpoint_every"])
        if resume and checkpoint_dir is None:
            raise Refused("--resume: name the run's folder with --checkpoint-dir.")
        place = (
            checkpoint_dir
            or Path("runs") / f"{folders.slug(method)}-{agreed(time.strftime('%Y%m%d-%H%M%S'))}"
        )
        setting = Setting(
            method=method, task=task, model=model, data=data, workers=workers, steps=steps, batch=batch,
            lr=lr, optimizer=optimizer, seed=seed, evaluations=evaluations, link=link,
            straggler=tuple(straggler or ()), checkpoint_every=checkpoint_every or None,
        )  # fmt: skip
        _prepare(place, setting, resume=resume)
        if tensorboard:
            _tensorboard()
    finished = _run(place, resume=resume)
    if joined() and os.environ["RANK"] != "0":
        return 0 if finished else 130
    if tensorboard:
        _write_tensorboard(place)
    if not finished:
        return _stopped(place, setting)
    run = read(place)
    if json:
        show.as_json(show.plain(summarize([run])[0]))
        return 0
    console = show.console()
    title = f"{run.setting.task}, {show.some(workers, 'worker')}, {show.some(steps, 'step')}"
    show.print_table(console, title, columns([run]), rows([run]))
    console.print(f"logs and checkpoints: {place}", soft_wrap=True)
    return 0


def _prepare(place: Path, setting: Setting, *, resume: bool) -> None:
    """Check everything, and write down what the run is; on resuming, that it is the same."""
    task = setting.find_task(folders.cache_of(place))
    check(setting, task)
    full = setting.filled(task)
    exists = (place / folders.SETTING).exists()
    if resume:
        if not exists:
            raise Refused(f"--resume: there is no run in {str(place)!r}.")
        before = folders.setting_of(place)
        if before != full:
            names = [field.name for field in fields(full)]
            changed = [name for name in names if getattr(full, name) != getattr(before, name)]
            told = ", ".join(f"{name} was {getattr(before, name)!r}" for name in changed)
            raise Refused(f"--resume: the run in {str(place)!r} is another: {told}.")
    elif exists and os.environ.get("RANK", "0") == "0":
        raise Refused(f"There is a run in {str(place)!r} already: add --resume, or name another folder.")
    if not joined() or os.environ["RANK"] == "0":
        parameters = sum(p.numel() for p in task.model().parameters())
        command = ["offbeat", *sys.argv[1:]]
        folders.prepare(place, full, command=command, unit=task.unit, parameters=parameters)


def _run(place: Path, *, resume: bool) -> bool:
    if joined():
        for _ in range(600):  # until rank 0 has written it
            if (place / folders.SETTING).exists():
                break
            time.sleep(0.1)
        if os.environ["RANK"] != "0":
            return join(place, resume=resume)
    with Monitor([place], Console(stderr=True)):
        return join(place, resume=resume) if joined() else launch([place], resume=resume)


def _stopped(place: Path, setting: Setting) -> int:
    saved = CheckpointStore(place / "checkpoints", rank=0, workers=setting.workers).whole()
    where = f"the last checkpoint is of step {saved[-1]}" if saved else "there is no checkpoint yet"
    print(f"offbeat: stopped; {where}: go on with --checkpoint-dir {place} --resume", file=sys.stderr)
    return 130


def _tensorboard() -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise Refused("--tensorboard: TensorBoard is not installed: pip install tensorboard") from None


def _write_tensorboard(place: Path) -> None:
    """All ranks' logs as scalars."""
    from torch.utils.tensorboard import SummaryWriter

    for rank, entries in enumerate(read(place).ranks):
        with SummaryWriter(str(place / "tensorboard" / f"rank-{rank}")) as writer:
            for entry in entries:
                values = {key: v for key, v in entry.items() if isinstance(v, int | float) and key != "step"}
                for key, value in values.items():
                    writer.add_scalar(f"{entry['kind']}/{key}", value, entry["step"], walltime=entry["t"])
