"""The page: what the logs say, put into one HTML file together with the script that draws it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from offbeat.app.runs.record import Entry
from offbeat.app.runs.setting import write_whole
from offbeat.app.runs.summary import Logged, labels, reference_of, summarize
from offbeat.base.checks import replace_nonfinite

Curve = dict[str, Any]
"""A name, and points of megabytes sent, loss, accuracy and period."""

BARS = 60  # steps shown of each rank, from the middle of the run
POINTS = 400  # rounds shown of a run, at most


def write_page(runs: Sequence[Logged], path: Path, *, curves: Sequence[Curve] = ()) -> None:
    """Write the page of these runs; it is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(runs, curves=curves))


def render(runs: Sequence[Logged], *, curves: Sequence[Curve] = ()) -> str:
    """The page as text."""
    parts = {
        name: (files("offbeat.app.report") / name).read_text()
        for name in ("page.html", "page.css", "page.js")
    }
    data = json.dumps(
        replace_nonfinite(told(runs, curves=curves)), ensure_ascii=False, allow_nan=False
    ).replace("</", "<\\/")
    page = parts["page.html"].replace("/*STYLE*/", parts["page.css"])
    return page.replace("/*SCRIPT*/", parts["page.js"]).replace("/*DATA*/", data)


def told(runs: Sequence[Logged], *, curves: Sequence[Curve] = ()) -> dict[str, Any]:
    """All that the page shows; with curves it is the page of a study, which shows them, not single runs."""
    rows = summarize(runs)
    return {
        "rows": [asdict(row) for row in rows],
        "reference": reference_of(runs),
        "setting": {**asdict(runs[0].setting), **runs[0].origin},
        "runs": [_run(run, label) for run, label in zip(runs, labels(runs), strict=True)],
        "curves": curves,
        "commands": list(dict.fromkeys(shlex.join(run.origin["command"]) for run in runs)),
    }


def _run(run: Logged, label: str) -> dict[str, Any]:
    first = run.ranks[0] if run.ranks else []
    return {
        "method": label,
        "seed": run.setting.seed,
        "workers": run.setting.workers,
        "folder": run.folder.name,
        "complete": run.complete,
        "evals": [
            [e["t"], e["units"] * run.setting.workers, e["sent"], e["loss"], e["step"]] for e in run.evals
        ],
        "rounds": _thin(_rounds([e for e in first if e["kind"] == "round"])),
        "ranks": _timeline(run),
    }


def _timeline(run: Logged) -> list[dict[str, Any]]:
    """Of each rank a stretch of steps from the middle, and the messages in the air during it."""
    shown = []
    for entries in run.ranks:
        steps = [e for e in entries if e["kind"] == "steps"]
        middle = steps[max(0, len(steps) // 2 - BARS // 2) :][:BARS]
        if not middle:
            continue
        low, high = middle[0]["t"] - middle[0]["seconds"], middle[-1]["t"]
        flights = [[e["began"], e["began"] + e["air"]] for e in entries if e["kind"] == "round"]
        shown.append(
            {
                "steps": [[e["t"], e["seconds"], e["waited"]] for e in middle],
                "flights": [[a, b] for a, b in flights if b >= low and a <= high],
                "seconds": sum(e["seconds"] for e in steps),
                "waited": sum(e["waited"] for e in steps),
            }
        )
    return shown


def _rounds(entries: Sequence[Entry]) -> list[list[Any]]:
    """When each began, how many steps after the one before it, and the drift."""
    before = [0, *[entry["begun_after"] for entry in entries]]
    return [[e["began"], e["begun_after"] - b, e["drift"]] for e, b in zip(entries, before, strict=False)]


def _thin(points: list[list[Any]]) -> list[list[Any]]:
    return points[:: max(1, -(-len(points) // POINTS))]
