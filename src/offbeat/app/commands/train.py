"""`offbeat train`"""

import importlib.util
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from offbeat.app.cli.options import Refused, reading
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import show
from offbeat.app.commands.join import Launch, join_workers, read_launch
from offbeat.app.commands.progress import follow_progress
from offbeat.app.commands.report import show_table
from offbeat.app.commands.resume import resume_command
from offbeat.app.runs import folder as folders
from offbeat.app.runs.elastic import is_elastic, saved_steps
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import MOST, Setting, check, why_unshared_in
from offbeat.app.runs.summary import read, summarize
from offbeat.app.runs.worker import work
from offbeat.base.checks import check_whole
from offbeat.base.errors import BadArgument
from offbeat.tasks import Task

FREE = ("steps", "checkpoint_every", "workers")  # settings that may change when a run is resumed


def run(given: SimpleNamespace) -> int:
    """Train with one method, as the launcher of local workers or as one of torchrun's."""
    with reading():
        least, given.workers = _read_workers(given.workers, elastic=given.elastic)
        _refuse_without_elastic(given)
    if given.elastic:
        return _run_elastic(given, least or 2)
    with reading():
        started = read_launch()
        if not given.resume:
            _count_workers(given.workers, started and started.workers)
    leads = started is None or started.rank == 0  # prints, and writes the folder
    with ExitStack() as stack:
        with reading():
            if started is not None:
                join_workers()
                stack.callback(dist.destroy_process_group)
            with waiting("preparing the run", quiet=given.quiet):
                place, setting, task, over = _prepare(given, started)
            if over:
                if leads:
                    _say_finished(place, setting)
                return 0
            if leads:
                stack.enter_context(folders.lock(place))
                if given.resume:
                    _hand_over(place, setting)
                folders.prepare(place, setting, task)
                stack.enter_context(follow_progress([place], quiet=given.quiet, verbose=given.verbose))
            if leads and given.tensorboard:
                from offbeat.app.commands.tensorboard import follow_logs

                stack.enter_context(follow_logs(place))
        if started is None:
            done = launch([place], resume=given.resume, single=True)
        else:
            done = _join(place, setting, resume=given.resume)
    if not leads:
        return 0 if done else 130
    command = resume_command(place, given, started)
    return _show(place, setting, json=given.json) if done else _say_stopped(place, setting, command)


def _refuse_without_elastic(given: SimpleNamespace) -> None:
    for option in ("lighthouse", "token"):
        if not given.elastic and getattr(given, option) is not None:
            raise Refused(f"--{option}: add --elastic.")


def _read_workers(text: str | None, *, elastic: bool) -> tuple[int | None, int | None]:
    """The fewest workers and the most, which are the same unless workers may come and go."""
    low, colon, high = (text or "").partition(":")
    numbers = [low, high] if colon else [low, low]
    if text is None:
        return (2, 4) if elastic else (None, None)
    plain = all(n.removeprefix("-").isdecimal() and n.isascii() and len(n) < 20 for n in numbers)
    if not plain or (colon and not elastic):
        advice = "a whole number, such as 4; with --elastic, also the fewest and the most, such as 2:6."
        raise BadArgument("workers", text, f"workers must be {advice}")
    fewest, most = map(int, numbers)
    if elastic and not 1 <= fewest <= most:
        raise BadArgument("workers", text, "the fewest must be at least 1, and at most the most.")
    return fewest, most


def _run_elastic(given: SimpleNamespace, least: int) -> int:
    from offbeat.app.commands import elastic

    with reading():
        place, exists = _find_place(given, None)
        if given.resume:
            if not _is_typed(given, "workers"):
                least, given.workers = elastic.least_of(place), None
            setting = _resumed(given, place, None)
            if folders.finished(place) and setting.steps <= folders.setting_of(place).steps:
                _say_finished(place, setting)
                return 0
        elif exists:
            raise Refused(f"There is a run in {str(place)!r} already: add --resume, or name another folder.")
        else:
            setting = _setting_of(given, given.workers)
    return elastic.train(given, setting, place, least)


def _find_place(given: SimpleNamespace, started: Launch | None) -> tuple[Path, bool]:
    """The folder of the run, and whether there is one."""
    if given.resume and given.checkpoint_dir is None:
        raise Refused("--resume: name the run's folder with --checkpoint-dir.")
    if given.method is None and not given.resume:
        raise Refused("Name a method, such as 'diloco(every=32)'; `offbeat methods` lists them.")
    check_whole("checkpoint_every", given.checkpoint_every, 0, MOST["checkpoint_every"])
    place = given.checkpoint_dir
    if place is None:
        place = Path("runs") / f"{folders.slug(given.method)}-{_start_time(started)}"
    exists = (place / folders.SETTING).exists()
    if given.resume and not exists:
        raise Refused(f"--resume: there is no run in {str(place)!r}.")
    if given.resume and is_elastic(place) != given.elastic:
        was = "was started without --elastic: leave it out" if given.elastic else "is elastic: add --elastic"
        raise Refused(f"--resume: the run in {str(place)!r} {was}.")
    return place, exists


def _is_typed(given: SimpleNamespace, option: str) -> bool:
    return getattr(given.context.get_parameter_source(option), "name", "") == "COMMANDLINE"


def _prepare(given: SimpleNamespace, started: Launch | None) -> tuple[Path, Setting, Task, bool]:
    """Check everything, and return the folder, the full setting, the task, and whether nothing is left to do.

    Writes nothing.
    """
    if given.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise Refused("--tensorboard: TensorBoard is not installed: pip install tensorboard")
    place, exists = _find_place(given, started)
    if given.resume:
        setting = _resumed(given, place, started)
    else:
        if exists:
            raise Refused(f"There is a run in {str(place)!r} already: add --resume, or name another folder.")
        setting = _setting_of(given, _count_workers(given.workers, started and started.workers))
    task = setting.find_task(folders.cache_of(place))
    full = check(setting, task)
    if given.resume:
        _check_number(place, full, task)
    over = given.resume and folders.finished(place) and full.steps <= folders.setting_of(place).steps
    if started is not None:
        dist.barrier()  # all have looked at the folder before rank 0 writes it
    return place, full, task, over


def _setting_of(given: SimpleNamespace, workers: int) -> Setting:
    return Setting(
        method=given.method, task=given.task, model=given.model, data=given.data, workers=workers,
        steps=given.steps, batch=given.batch, lr=given.lr, optimizer=given.optimizer, seed=given.seed,
        evaluations=given.evaluations, link=given.link, straggler=tuple(given.straggler or ()),
        checkpoint_every=given.checkpoint_every or None,
    )  # fmt: skip


def _resumed(given: SimpleNamespace, place: Path, started: Launch | None) -> Setting:
    """The setting of the run, with more steps if the user has typed them. Other options must be the same."""
    before = folders.setting_of(place)
    workers = given.workers if started is None else started.workers
    typed = _setting_of(given, before.workers if workers is None else workers)
    own = {
        name: value for name, value in asdict(typed).items() if _is_typed(given, name) or name == "workers"
    }
    if given.method is not None:
        own["method"] = typed.method.strip() + ("" if "(" in typed.method else "()")
    changed = [name for name in own if name not in FREE and own[name] != asdict(before)[name]]
    if changed:
        values = ", ".join(f"{name} was {asdict(before)[name]!r}" for name in changed)
        raise Refused(f"--resume: the run in {str(place)!r} has another setting: {values}.")
    steps, made = own.get("steps", before.steps), _last_saved(place, before)
    if steps < (before.steps if folders.finished(place) else made or 0):
        raise BadArgument("steps", steps, f"the run in {str(place)!r} has already made more.")
    if steps > before.steps and made is None:
        raise BadArgument("steps", steps, f"the run in {str(place)!r} has no checkpoint to continue from.")
    return replace(before, **{name: own[name] for name in FREE if name in own})


def _hand_over(place: Path, setting: Setting) -> None:
    """Keep the checkpoints of another number of workers apart from those that these will write."""
    before = folders.setting_of(place)
    if before.workers != setting.workers:
        folders.CheckpointStore(place / "checkpoints", rank=0, workers=before.workers).hand_over()


def _check_number(place: Path, setting: Setting, task: Task) -> None:
    """Raise if another number of workers than before cannot continue the run."""
    before = folders.setting_of(place)
    if setting.workers != before.workers and _last_saved(place, before) is not None:
        if reason := why_unshared_in(setting, task):
            sentence = (
                f"{setting.method} cannot go on with another number of workers than the {before.workers} "
            )
            raise BadArgument("workers", setting.workers, f"{sentence}it had, because {reason}.")


def _last_saved(place: Path, setting: Setting) -> int | None:
    store = folders.CheckpointStore(place / "checkpoints", rank=0, workers=setting.workers)
    saved = saved_steps(place) if is_elastic(place) else store.steps()
    return saved[-1] if saved else None


def _count_workers(given: int | None, started: int | None) -> int:
    """The number of workers: as given, or as many as torchrun has started."""
    if started is not None and given not in (None, started):
        reason = f"torchrun has started {show.count(started, 'worker')}; leave this option out."
        raise BadArgument("workers", given, reason)
    return started or (4 if given is None else given)


def _start_time(started: Launch | None) -> str:
    """Under torchrun, the time of rank 0: the clocks of ranks differ."""
    digits = torch.tensor(int(time.strftime("%Y%m%d%H%M%S")))
    if started is not None:
        dist.broadcast(digits, src=0)
    return "{}-{:06}".format(*divmod(int(digits), 10**6))


def _join(place: Path, setting: Setting, *, resume: bool) -> bool:
    """Train as one of torchrun's workers, once rank 0 has written the setting."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (place / folders.SETTING).exists() and folders.setting_of(place) == setting:
            break
        time.sleep(0.1)
    return work([place], resume=resume, single=True)


def _say_finished(place: Path, setting: Setting) -> None:
    steps = show.count(setting.steps, "step")
    print(f"offbeat: the run in {str(place)!r} is finished, after {steps}; a larger --steps extends it")


def _say_stopped(place: Path, setting: Setting, command: str) -> int:
    saved = _last_saved(place, setting)
    where = "there is no checkpoint yet" if saved is None else f"the last checkpoint is at step {saved}"
    print(f"offbeat: stopped; {where}: continue with {command}", file=sys.stderr)
    return 130


def _show(place: Path, setting: Setting, *, json: bool) -> int:
    """Print what came out, and where the model is."""
    trained = read(place)
    if json:
        show.print_json(asdict(summarize([trained])[0]))
        return 0
    steps, workers = show.count(setting.steps, "step"), show.count(setting.workers, "worker")
    show_table([trained], f"{setting.task}, {workers}, {steps}")
    console, model = show.console(), place / folders.MODEL
    show.say(console, f"logs and checkpoints: {place}")
    show.say(console, f"the model: {model}; load it with")
    show.say(console, f"    model.load_state_dict(torch.load({str(model)!r}, weights_only=True))")
    return 0
