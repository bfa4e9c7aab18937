"""Does an emulated link take as long as a shaped one? Seconds of the same training on either, side by side.

    sudo python benchmarks/links/run.py 50mbit 100mbit

1.9 M parameters, 4 workers, 8 steps. `Throttled` between processes on one machine against real TCP between
network namespaces with shaped links, in turn, twice. The limit is what the bytes alone take on the link.
Appends to results.jsonl beside this file and prints the table.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from offbeat.app.runs.folder import prepare, slug
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import Setting
from offbeat.app.runs.summary import read, summarize
from offbeat.base.units import parse_link
from offbeat.lab import unavailable

METHODS = ["torch_ddp()", "ddp()", "local_sgd(every=2)", "cocod(every=4, delay=2)"]
RESULTS = Path(__file__).parent / "results.jsonl"


def measured(link: str, where: str) -> list[dict]:
    """One run of every method in the same workers."""
    place = Path(tempfile.mkdtemp())
    folders = []
    for method in METHODS:
        setting = Setting(
            method=method,
            task="bytes",
            model="medium",
            steps=8,
            batch=2,
            evaluations=1,
            link=link,
            where=where,
        )
        task = setting.find_task()
        folders.append(place / slug(method))
        prepare(folders[-1], setting.fill(task), task, command=sys.argv)
    launch(folders)
    rows = summarize([read(folder) for folder in folders])
    shutil.rmtree(place)
    keys = ("method", "seconds", "exposed", "megabytes")
    return [{"link": link, "where": where, **{key: getattr(row, key) for key in keys}} for row in rows]


def table(results: list[dict]) -> str:
    lines = [
        "| link | method | emulated (s) | shaped (s) | ratio | bytes alone (s) |",
        "|---|---|---|---|---|---|",
    ]
    for link in dict.fromkeys(row["link"] for row in results):
        for method in METHODS:
            found = {
                where: [
                    row
                    for row in results
                    if (row["link"], row["method"], row["where"]) == (link, method, where)
                ]
                for where in ("processes", "netns")
            }
            slow, real = (statistics.mean(row["seconds"] for row in rows) for rows in found.values())
            least = found["netns"][0]["megabytes"] * 1e6 / parse_link(link).rate
            lines.append(
                f"| {link} | `{method}` | {slow:.2f} | {real:.2f} | {slow / real:.3f} | {least:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    if reason := unavailable():
        raise SystemExit(reason)
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for link in sys.argv[1:]:
        for where in ("processes", "netns") * 2:
            found = measured(link, where)
            results += found
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    print(table(results))


if __name__ == "__main__":
    main()
