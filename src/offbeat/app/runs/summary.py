"""The table of a comparison, computed from the logs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offbeat.app.runs.folder import Entry, entries, log_path, origin_of, setting_of
from offbeat.app.runs.setting import TORCH_DDP, Setting

REACHED = 0.05  # a loss at most this share above the reference's counts as reached


@dataclass(frozen=True)
class Logged:
    """The logs of one run. `ends` has the last line of each rank that finished."""

    folder: Path
    setting: Setting
    origin: dict[str, Any]
    ranks: tuple[list[Entry], ...]
    evals: list[Entry]
    ends: list[Entry]

    @property
    def complete(self) -> bool:
        return len(self.ends) == self.setting.workers


@dataclass(frozen=True)
class Row:
    """One method over its seeds. Seconds, bytes and rounds are means over ranks and seeds."""

    method: str
    seeds: int
    loss: float
    spread: float | None  # the standard deviation over the seeds
    accuracy: float | None
    seconds: float
    exposed: float  # seconds a worker stood still for messages
    hidden: float  # seconds messages were in the air while it worked
    megabytes: float  # sent by one worker
    rounds: float
    reached: float | None  # seconds to a loss within 5 % of the reference's final loss
    speedup: float | None  # the reference's seconds over these
    kernel_megabytes: float | None  # as the kernel counted, start and evaluations included
    reported_megabytes: float | None  # as Offbeat counted, start and evaluations included


def read(folder: Path) -> Logged:
    setting = setting_of(folder)
    ranks = tuple(list(entries(log_path(folder, rank))) for rank in range(setting.workers))
    evals = [entry for rank in ranks[:1] for entry in rank if entry["kind"] == "eval"]
    ends = [entry for rank in ranks for entry in rank if entry["kind"] == "end"]
    return Logged(folder, setting, origin_of(folder), ranks, evals, ends)


def summarize(runs: Sequence[Logged]) -> list[Row]:
    """One row per setting over its seeds, in order of appearance, without unfinished runs."""
    groups: dict[str, list[Logged]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        if run.complete:
            groups.setdefault(label, []).append(run)
    base = groups.get(reference_of(runs) or "", [])
    return [_row(label, seeds, base) for label, seeds in groups.items()]


def labels(runs: Sequence[Logged]) -> list[str]:
    """The name of each run: its method, and every other setting that differs, except the seed."""
    names = [field.name for field in fields(Setting) if field.name not in ("method", "seed")]
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


def _row(method: str, runs: Sequence[Logged], base: Sequence[Logged]) -> Row:
    losses = [run.evals[-1]["loss"] for run in runs]
    right = [run.evals[-1]["accuracy"] for run in runs if "accuracy" in run.evals[-1]]
    seconds = _mean(runs, "t")
    target = statistics.mean(run.evals[-1]["loss"] for run in base)
    target += REACHED * abs(target)
    times = [reach(run.evals, target) if math.isfinite(run.evals[-1]["loss"]) else None for run in runs]
    counted = all("kernel_sent" in end for run in runs for end in run.ends)
    return Row(
        method=method, seeds=len(runs), loss=statistics.mean(losses), seconds=seconds,
        spread=statistics.stdev(losses) if len(losses) > 1 else None,
        accuracy=statistics.mean(right) if right else None,
        exposed=_mean(runs, "exposed"), megabytes=_mean(runs, "sent") / 1e6, rounds=_mean(runs, "rounds"),
        hidden=statistics.mean(max(0.0, end["air"] - end["exposed"]) for run in runs for end in run.ends),
        reached=None if None in times else statistics.mean(time for time in times if time is not None),
        speedup=_mean(base, "t") / seconds if base and seconds else None,
        kernel_megabytes=_mean(runs, "kernel_sent") / 1e6 if counted else None,
        reported_megabytes=_mean(runs, "sent_in_all") / 1e6 if counted else None,
    )  # fmt: skip


def reach(evals: Sequence[Entry], target: float) -> float | None:
    """When the loss first reached the target, interpolated between evaluations."""
    index = next((i for i, entry in enumerate(evals) if entry["loss"] <= target), None)
    if index is None:
        return None
    before, entry = evals[max(0, index - 1)], evals[index]
    if not math.isfinite(before["loss"]) or before["loss"] == entry["loss"]:
        return float(entry["t"])
    share = (before["loss"] - target) / (before["loss"] - entry["loss"])
    return float(before["t"] + share * (entry["t"] - before["t"]))


def _mean(runs: Sequence[Logged], name: str) -> float:
    return statistics.mean(float(end[name]) for run in runs for end in run.ends)
