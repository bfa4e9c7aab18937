"""The report: one HTML file with the data of the logs and the script that draws it."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from offbeat.app.runs.folder import write_whole
from offbeat.app.runs.presence import list_presence
from offbeat.app.runs.schema import Entry
from offbeat.app.runs.summary import (
    Logged,
    best_runs,
    labels,
    reference_of,
    sections,
    summarize,
    unfinished,
)
from offbeat.app.runs.verdict import trade_off, verdict
from offbeat.base.checks import replace_nonfinite

BARS = 60  # steps of each rank in the timeline
POINTS = 400  # rounds of a run in a chart, at most


def write_page(
    runs: Sequence[Logged],
    path: Path,
    *,
    curves: Sequence[dict[str, Any]] = (),
    to_loss: float | None = None,
) -> None:
    """Write the page of these runs, in one piece. Curves have a name, and points as a study collects them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(runs, curves=curves, to_loss=to_loss))


def render(
    runs: Sequence[Logged], *, curves: Sequence[dict[str, Any]] = (), to_loss: float | None = None
) -> str:
    """The page as text: a part for each group of runs that can be compared. A study is one group."""
    folder = files("offbeat.app.report")
    page, style, script = ((folder / f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    groups = [runs] if curves else sections(runs)
    values = replace_nonfinite([collect(group, curves=curves, to_loss=to_loss) for group in groups])
    data = json.dumps(values, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("/*DATA*/", data)


def collect(
    runs: Sequence[Logged], *, curves: Sequence[dict[str, Any]] = (), to_loss: float | None = None
) -> dict[str, Any]:
    """The data of one part of the page. A study passes curves, which are shown instead of single runs."""
    rows, reference = summarize(runs, to_loss=to_loss), reference_of(runs)
    shown = {run.folder for run in best_runs(runs)}
    named = zip(runs, labels(runs), strict=True)
    return {
        "rows": [asdict(row) for row in rows],
        "reference": reference,
        "to_loss": to_loss,
        "verdict": trade_off(curves) if curves else verdict(rows, reference, to_loss=to_loss),
        "unfinished": unfinished(runs),
        "setting": {**asdict(runs[0].setting), **runs[0].origin},
        "runs": [_run(run, label) for run, label in named if run.folder in shown or not run.complete],
        "curves": curves,
        "commands": list(dict.fromkeys(shlex.join(run.origin["command"]) for run in runs)),
    }


def _run(run: Logged, label: str) -> dict[str, Any]:
    """A run, with the rounds of rank 0: when each began, the steps since the one before, and the drift."""
    workers = run.setting.workers
    begun = [e for rank in run.ranks[:1] for e in rank if e["kind"] == "round"]
    before = [0, *[e["begun_after"] for e in begun]]
    rounds = [[e["began"], e["begun_after"] - b, e["drift"]] for e, b in zip(begun, before, strict=False)]
    return {
        "method": label, "seed": run.setting.seed, "workers": workers,
        "folder": run.folder.name, "complete": run.complete,
        "evals": [[e["t"], e["units"] * workers, e["sent"], e["loss"], e["step"]] for e in run.evals],
        "rounds": rounds[:: max(1, -(-len(rounds) // POINTS))],
        "presence": [asdict(own) for own in list_presence(run)],
        "ranks": [timeline for entries in run.ranks if (timeline := _timeline(entries))],
    }  # fmt: skip


def _timeline(entries: list[Entry]) -> dict[str, Any]:
    """Steps of a rank from the middle of the run, and the messages in flight during them."""
    steps = [e for e in entries if e["kind"] == "steps"]
    middle = steps[max(0, len(steps) // 2 - BARS // 2) :][:BARS]
    if not middle:
        return {}
    low, high = middle[0]["t"] - middle[0]["seconds"], middle[-1]["t"]
    flights = [[e["began"], e["began"] + e["air"]] for e in entries if e["kind"] == "round"]
    return {
        "steps": [[e["t"], e["seconds"], e["exposed"]] for e in middle],
        "flights": [[a, b] for a, b in flights if b >= low and a <= high],
        "seconds": sum(e["seconds"] for e in steps),
        "exposed": sum(e["exposed"] for e in steps),
    }
