"""The report: one HTML file with the data of the logs and the script that draws it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from offbeat.app.runs.folder import write_whole
from offbeat.app.runs.summary import Logged, labels, reference_of, summarize
from offbeat.base.checks import replace_nonfinite

Curve = dict[str, Any]
"""A name, and points of (megabytes sent, loss, accuracy, period)."""

BARS = 60  # steps of each rank in the timeline
POINTS = 400  # rounds of a run in a chart, at most


def write_page(runs: Sequence[Logged], path: Path, *, curves: Sequence[Curve] = ()) -> None:
    """Write the page of these runs, in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(runs, curves=curves))


def render(runs: Sequence[Logged], *, curves: Sequence[Curve] = ()) -> str:
    """The page as text."""
    folder = files("offbeat.app.report")
    page, style, script = ((folder / f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    values = replace_nonfinite(collect(runs, curves=curves))
    data = json.dumps(values, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    return page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("/*DATA*/", data)


def collect(runs: Sequence[Logged], *, curves: Sequence[Curve] = ()) -> dict[str, Any]:
    """The data of the page. A study passes curves, which the page shows instead of single runs."""
    return {
        "rows": [asdict(row) for row in summarize(runs)],
        "reference": reference_of(runs),
        "setting": {**asdict(runs[0].setting), **runs[0].origin},
        "runs": [_run(run, label) for run, label in zip(runs, labels(runs), strict=True)],
        "curves": curves,
        "commands": list(dict.fromkeys(shlex.join(run.origin["command"]) for run in runs)),
    }


def _run(run: Logged, label: str) -> dict[str, Any]:
    workers = run.setting.workers
    return {
        "method": label,
        "seed": run.setting.seed,
        "workers": workers,
        "folder": run.folder.name,
        "complete": run.complete,
        "evals": [[e["t"], e["units"] * workers, e["sent"], e["loss"], e["step"]] for e in run.evals],
        "rounds": _rounds(run),
        "ranks": _timeline(run),
    }


def _rounds(run: Logged) -> list[list[Any]]:
    """When each round of rank 0 began, the steps since the round before it, and the drift."""
    entries = [e for rank in run.ranks[:1] for e in rank if e["kind"] == "round"]
    before = [0, *[e["begun_after"] for e in entries]]
    rounds = [[e["began"], e["begun_after"] - b, e["drift"]] for e, b in zip(entries, before, strict=False)]
    return rounds[:: max(1, -(-len(rounds) // POINTS))]


def _timeline(run: Logged) -> list[dict[str, Any]]:
    """For each rank, steps from the middle of the run and the messages in the air during them."""
    ranks = []
    for entries in run.ranks:
        steps = [e for e in entries if e["kind"] == "steps"]
        middle = steps[max(0, len(steps) // 2 - BARS // 2) :][:BARS]
        if not middle:
            continue
        low, high = middle[0]["t"] - middle[0]["seconds"], middle[-1]["t"]
        flights = [[e["began"], e["began"] + e["air"]] for e in entries if e["kind"] == "round"]
        ranks.append(
            {
                "steps": [[e["t"], e["seconds"], e["exposed"]] for e in middle],
                "flights": [[a, b] for a, b in flights if b >= low and a <= high],
                "seconds": sum(e["seconds"] for e in steps),
                "exposed": sum(e["exposed"] for e in steps),
            }
        )
    return ranks
