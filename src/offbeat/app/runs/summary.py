"""The table of a comparison, computed from the logs."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offbeat.app.runs.folder import entries, log_path, origin_of, setting_of
from offbeat.app.runs.schema import Entry
from offbeat.app.runs.setting import TORCH_DDP, Setting

REACHED = 0.05  # a loss at most this share above the reference's counts as reached
VARIED = ("method", "lr", "seed", "evaluations", "checkpoint_every")  # may differ between runs to compare


@dataclass(frozen=True)
class Logged:
    """The logs of one run. `ends` has the last line of each rank that finished."""

    folder: Path
    setting: Setting
    origin: dict[str, Any]
    ranks: tuple[list[Entry], ...]
    evals: list[Entry]
    ends: list[Entry]
    notes: tuple[str, ...] = ()  # on lines that could not be read

    @property
    def complete(self) -> bool:
        enough = 1 if "elastic" in self.origin else self.setting.workers
        return len(self.ends) >= enough and bool(self.evals)

    @property
    def loss(self) -> float:
        """On held-out data, after the last step."""
        return float(self.evals[-1]["loss"])


@dataclass(frozen=True)
class Row:
    """One method over its seeds, at its best rate. Seconds, bytes, rounds: means over ranks and seeds."""

    method: str
    lr: float | None  # of the rates tried, the one with the lowest final loss
    rates: tuple[tuple[float, float], ...]  # all rates tried, each with its final loss over the seeds of all
    seeds: int
    loss: float
    spread: float | None  # the standard deviation over the seeds
    accuracy: float | None
    seconds: float
    exposed: float  # seconds a worker stood still for messages
    hidden: float  # seconds messages were in flight while it worked
    megabytes: float  # sent by one worker
    rounds: float
    reached: float | None  # seconds to the target: a given loss, or 5 % above the reference's final loss
    reached_megabytes: float | None  # sent by rank 0 until then
    speedup: float | None  # the reference's seconds over these
    kernel_megabytes: float | None  # as the kernel counted, start and evaluations included
    reported_megabytes: float | None  # as Offbeat counted, start and evaluations included


def read(folder: Path) -> Logged:
    setting = setting_of(folder)
    ranks, notes = [], []
    for rank in range(setting.workers):
        skipped: list[int] = []
        ranks.append(list(entries(log := log_path(folder, rank), skipped=skipped)))
        if log.exists() and not log.is_file():
            notes.append(f"{log}: not read, because it is not a file")
        if skipped:
            count = f"{len(skipped)} line{'' if len(skipped) == 1 else 's'}"
            notes.append(f"{log}: skipped {count} that a run does not write, the first is line {skipped[0]}")
    origin = origin_of(folder)
    first = ranks if "elastic" in origin else ranks[:1]  # the first of those that were there evaluates
    evals = [entry for rank in first for entry in rank if entry["kind"] == "eval"]
    evals.sort(key=lambda entry: (entry["step"], entry["t"]))
    ends = [[entry for entry in rank if entry["kind"] == "end"] for rank in ranks]
    last = [own[-1] for own in ends if own]
    return Logged(folder, setting, origin, tuple(ranks), evals, last, tuple(notes))


def sections(runs: Sequence[Logged]) -> list[list[Logged]]:
    """The runs in groups that can be compared: the same task, cluster and length, in order of appearance."""
    names = [field.name for field in fields(Setting) if field.name not in VARIED]
    found: dict[tuple[Any, ...], list[Logged]] = {}
    for run in runs:
        found.setdefault(tuple(getattr(run.setting, name) for name in names), []).append(run)
    return list(found.values())


def summarize(runs: Sequence[Logged], *, to_loss: float | None = None) -> list[Row]:
    """One row per method over its seeds, in order of appearance, without unfinished runs.

    The target of `reached` is `to_loss`, or else the loss of the reference with the same seed.
    """
    tried = _by_rate(runs)
    base = _best(tried[reference]) if (reference := reference_of(runs)) else []
    targets = {run.setting.seed: run.loss + REACHED * abs(run.loss) for run in base}
    mean = statistics.mean(targets.values()) if targets else 0.0  # for seeds that the reference lacks

    def target(run: Logged) -> float:
        return targets.get(run.setting.seed, mean) if to_loss is None else to_loss

    return [_row(label, rates, base, target) for label, rates in tried.items()]


def best_runs(runs: Sequence[Logged]) -> list[Logged]:
    """The finished runs of each method at its best rate: those of the table."""
    return [run for rates in _by_rate(runs).values() for run in _best(rates)]


def unfinished(runs: Sequence[Logged]) -> list[str]:
    """Each run that has not finished, and how far it came."""
    many = len({run.setting.lr for run in runs}) > 1
    found = []
    for run, label in zip(runs, labels(runs), strict=True):
        if not run.complete:
            step = min(max((entry["step"] for entry in rank), default=0) for rank in run.ranks)
            rate = f", lr {run.setting.lr:g}" if many and run.setting.lr is not None else ""
            found.append(f"{label}{rate}, seed {run.setting.seed} ({step:,} of {run.setting.steps:,} steps)")
    return found


def labels(runs: Sequence[Logged]) -> list[str]:
    """The name of each run: its method, and every setting that differs within what a study varies."""
    names = [field.name for field in fields(Setting) if field.name not in VARIED]
    differ = [name for name in names if len({getattr(run.setting, name) for run in runs}) > 1]

    def describe(name: str, value: Any) -> str:
        text = " and ".join(value) or None if isinstance(value, tuple) else value
        return f" × {value}" if name == "workers" else f", {name} {text}"

    settings = [run.setting for run in runs]
    return [s.method + "".join(describe(name, getattr(s, name)) for name in differ) for s in settings]


def reference_of(runs: Sequence[Logged]) -> str | None:
    """The label of the reference: torch's DDP, else our ddp, else the first finished run."""
    pairs = zip(runs, labels(runs), strict=True)
    done = [(run.setting.method, label) for run, label in pairs if run.complete]
    preferred = [label for wanted in (TORCH_DDP, "ddp()") for method, label in done if method == wanted]
    return next(iter([*preferred, *[label for _, label in done]]), None)


def _by_rate(runs: Sequence[Logged]) -> dict[str, dict[float | None, list[Logged]]]:
    """The finished runs by label and learning rate."""
    found: dict[str, dict[float | None, list[Logged]]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        if run.complete:
            found.setdefault(label, {}).setdefault(run.setting.lr, []).append(run)
    return found


def _mean_loss(runs: Sequence[Logged]) -> float:
    return statistics.mean(run.loss for run in runs)


def _losses(rates: Mapping[float | None, list[Logged]]) -> dict[float | None, float]:
    """The loss of each rate, over the seeds that all rates have; over all seeds if they share none."""
    shared = set.intersection(*[{run.setting.seed for run in runs} for runs in rates.values()])
    return {
        lr: _mean_loss([run for run in runs if not shared or run.setting.seed in shared])
        for lr, runs in rates.items()
    }


def _best(rates: Mapping[float | None, list[Logged]]) -> list[Logged]:
    """The runs with the lowest loss. One that diverged is worse than any other."""
    losses = _losses(rates)
    return rates[min(rates, key=lambda lr: (losses[lr] if math.isfinite(losses[lr]) else math.inf, lr or 0))]


def _row(
    method: str,
    rates: Mapping[float | None, list[Logged]],
    base: Sequence[Logged],
    target: Callable[[Logged], float],
) -> Row:
    runs = _best(rates)
    losses = [run.loss for run in runs]
    right = [run.evals[-1]["accuracy"] for run in runs if "accuracy" in run.evals[-1]]
    seconds = _mean(runs, "t")
    counted = all("kernel_sent" in end for run in runs for end in run.ends)

    def reached(name: str) -> float | None:
        """The mean over the seeds if all of them reached the target."""
        found = [reach(run.evals, target(run), name) if math.isfinite(run.loss) else None for run in runs]
        return None if None in found else statistics.mean(value for value in found if value is not None)

    sent = reached("sent")
    return Row(
        method=method, lr=runs[0].setting.lr, seeds=len(runs), loss=_mean_loss(runs), seconds=seconds,
        rates=tuple(sorted((lr or 0.0, loss) for lr, loss in _losses(rates).items())),
        spread=statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None,
        accuracy=statistics.mean(right) if right else None,
        exposed=_mean(runs, "exposed"), megabytes=_mean(runs, "sent") / 1e6, rounds=_mean(runs, "rounds"),
        hidden=statistics.mean(max(0.0, end["air"] - end["exposed"]) for run in runs for end in run.ends),
        reached=reached("t"), reached_megabytes=None if sent is None else sent / 1e6,
        speedup=_mean(base, "t") / seconds if base and seconds else None,
        kernel_megabytes=_mean(runs, "kernel_sent") / 1e6 if counted else None,
        reported_megabytes=_mean(runs, "sent_in_all") / 1e6 if counted else None,
    )  # fmt: skip


def reach(evals: Sequence[Entry], target: float, name: str = "t") -> float | None:
    """When the loss first reached the target, or another cost by then, interpolated between evaluations."""
    index = next((i for i, entry in enumerate(evals) if entry["loss"] <= target), None)
    if not index:
        return None if index is None else 0.0  # the untrained model
    before, entry = evals[index - 1], evals[index]
    if not math.isfinite(before["loss"]) or before["loss"] == entry["loss"]:
        return float(entry[name])
    share = (before["loss"] - target) / (before["loss"] - entry["loss"])
    return float(before[name] + share * (entry[name] - before[name]))


def _mean(runs: Sequence[Logged], name: str) -> float:
    return statistics.mean(float(end[name]) for run in runs for end in run.ends)
