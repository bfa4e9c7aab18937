"""`offbeat compare`"""

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from offbeat.app.cli import saying
from offbeat.app.cli.options import Refused, about, check_loss, check_once, name_of, reading
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import show
from offbeat.app.commands.progress import follow_progress
from offbeat.app.commands.report import show_runs
from offbeat.app.runs import folder as folders
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import Setting, check, check_values
from offbeat.app.runs.summary import read
from offbeat.base.checks import check_number, check_whole
from offbeat.base.errors import BadArgument
from offbeat.base.units import parse_seconds
from offbeat.lab import unavailable
from offbeat.methods.expression import method as read_method
from offbeat.tasks import Task


def run(given: SimpleNamespace) -> int:
    """Make the runs that are missing, and show all of them."""
    with reading():
        _check(given)
        rates = [None] if given.lr is None else _parse_rates(given.lr)
        compute = "20ms" if given.compute is None else given.compute
        first = Setting(
            method=given.methods[0], task=given.task, model=given.model, data=given.data,
            workers=given.workers, steps=given.steps, batch=given.batch, lr=rates[0],
            optimizer=given.optimizer, evaluations=given.evaluations, link=given.link,
            straggler=tuple(given.straggler or ()),
            where="netns" if given.netns else "simulation" if given.simulate else "processes",
            compute=parse_seconds(compute, "compute"),
        )  # fmt: skip
        place = given.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        with waiting("preparing the runs", quiet=given.quiet):
            runs = _runs(first, given.methods, rates, given.seeds, place)
        with folders.lock(place):
            prepared = folders.prepare_all(place, runs)
    missing = [folder for folder in prepared if not folders.finished(folder)]
    if len(rates) > 1 and not given.quiet:
        _announce(len(prepared), len(missing), len(rates), given.seeds)
    if missing and not _launch(missing, place, quiet=given.quiet, verbose=given.verbose):
        return 130
    show_runs(
        [read(folder) for folder in prepared], place / "report.html", to_loss=given.to_loss, json=given.json
    )
    return 0


def _launch(missing: Sequence[Path], place: Path, *, quiet: bool, verbose: bool) -> bool:
    """Make these runs; False after Ctrl-C."""
    with ExitStack() as stack:
        with reading():
            stack.enter_context(folders.lock(place))
        stack.enter_context(saying(words := f"stopped; to run the rest, repeat with {_out(place)}"))
        with follow_progress(missing, quiet=quiet, verbose=verbose):
            done = launch(missing, resume=True)
        if not done:
            print(f"offbeat: {words}", file=sys.stderr)
        return done


def _out(place: Path) -> str:
    return f"--out {shlex.quote(str(place))}"


def _check(given: SimpleNamespace) -> None:
    if given.netns and given.simulate:
        raise Refused("--netns and --simulate exclude each other.")
    if given.compute is not None and not given.simulate:
        raise Refused("--compute needs --simulate: real steps take the time that they take.")
    if given.netns and (reason := unavailable()):
        raise Refused(f"--netns: {reason}")
    if given.compute is not None and parse_seconds(given.compute, "compute") == 0:
        raise BadArgument("compute", given.compute, "must be longer than 0.")
    check_whole("seeds", given.seeds, 1, 1000)
    check_loss(given.to_loss)


def _runs(
    first: Setting, methods: Sequence[str], rates: Sequence[float | None], seeds: int, place: Path
) -> dict[str, tuple[Setting, Task]]:
    """By name, each run with its task. All are checked before anything is written."""
    runs = {}
    for method in methods:
        check_values(replace(first, method=method))
    check_once([str(read_method(m)) for m in methods if name_of(m) != "torch_ddp"])
    for seed in range(seeds):
        found = replace(first, seed=seed).find_task(folders.cache_of(place / "any"))
        for (number, method), lr in product(enumerate(methods), rates):
            setting = replace(first, method=method, seed=seed, lr=lr)
            with about(method):
                full = check(setting, found) if seed == 0 and lr == rates[0] else setting.fill(found)
            name = f"{number:02d}-{folders.slug(full.method)}"
            assert full.lr is not None
            # A run at the task's own rate has the first name, or the second if the rate was given.
            names = [f"{name}-seed{seed}", f"{name}-lr{float(full.lr)!r}-seed{seed}"]
            made = (one for one in names if folders.holds(place / one, full))
            runs[next(made, names[lr is not None])] = full, found
    return runs


def _announce(runs: int, missing: int, rates: int, seeds: int) -> None:
    """Say how many runs a search takes before they start."""
    factors = [show.count(runs // (rates * seeds), "method"), show.count(rates, "rate")]
    factors += [show.count(seeds, "seed")] if seeds > 1 else []
    done = runs - missing
    told = f"; {done} of them {'is' if done == 1 else 'are'} done" if done else ""
    print(f"offbeat: {show.count(runs, 'run')}: {' × '.join(factors)}{told}", file=sys.stderr)


def _parse_rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument("lr", text, "must be a number, or several separated by commas.") from None
    for rate in rates:
        check_number("lr", rate, 1e6)
    return list(dict.fromkeys(rates))
