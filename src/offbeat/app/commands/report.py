"""`offbeat report`, and the tables of runs that other commands print, too."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from offbeat.app.cli.options import check_loss, plain, reading
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import show
from offbeat.app.report.page import write_page
from offbeat.app.runs.folder import find
from offbeat.app.runs.summary import (
    VARIED,
    Logged,
    Row,
    labels,
    read,
    reference_of,
    sections,
    summarize,
    unfinished,
)
from offbeat.app.runs.verdict import verdict
from offbeat.base.errors import BadArgument

OPTIONAL = ("lr", "accuracy", "MB on the wire")  # columns that are left out if they are empty
PLACES = {"netns": "shaped links", "simulation": "simulated", "processes": "emulated link"}
UNLINKED = {"netns": "network namespaces", "simulation": "simulated", "processes": "not simulated"}
TOLD = ("task", "workers", "steps", "link", "where")  # settings that titles tell in their own words


def run(given: SimpleNamespace) -> int:
    """Read the runs, write the page and print the tables."""
    with reading():
        check_loss(given.to_loss)
        if given.out.is_dir():
            raise BadArgument("out", str(given.out), "this is a folder; name an HTML file.")
        with waiting("reading the runs", quiet=given.quiet):
            runs = [read(folder) for folder in find(given.runs)]
    show_runs(runs, given.out, to_loss=given.to_loss, json=given.json)
    return 0


def show_runs(runs: Sequence[Logged], page: Path, *, to_loss: float | None, json: bool) -> None:
    """Write the page of these runs, and print a table of each group that can be compared."""
    for note in [note for run in runs for note in run.notes]:
        print(plain(f"offbeat: {note}"), file=sys.stderr)
    write_page(runs, page, to_loss=to_loss)
    if json:
        tables = {caption(group, runs): summarize(group, to_loss=to_loss) for group in sections(runs)}
        show.print_json([{"section": title, **asdict(row)} for title in tables for row in tables[title]])
        for text in (text for group in sections(runs) for text in unfinished(group)):
            print(plain(f"offbeat: unfinished and left out: {text}"), file=sys.stderr)
        return
    for group in sections(runs):
        title, reference = caption(group, runs), reference_of(group)
        told = f"; the reference is {reference}" if reference and len(set(labels(group))) > 1 else ""
        show_table(group, f"{title}{told}", to_loss=to_loss)
    show.say(show.console(), f"report: {page}")


def show_table(runs: Sequence[Logged], title: str, *, to_loss: float | None = None) -> None:
    """Print the table of these runs, without empty optional columns. One sentence says what came out."""
    rows, console = summarize(runs, to_loss=to_loss), show.console()
    cells = {
        heading: column
        for heading, tell in _columns(rows, to_loss).items()
        if any(column := [tell(row) for row in rows]) or heading not in OPTIONAL
    }
    columns = {heading: "fold" if heading == "method" else "right" for heading in cells}
    if rows:
        show.print_table(console, title, columns, list(zip(*cells.values(), strict=True)))
    else:
        show.say(console, title)
    lines = [f"unfinished: {text}" for text in unfinished(runs)]
    ends = [row.method for row in rows if row.rates[1:] and row.lr in (row.rates[0][0], row.rates[-1][0])]
    if ends:
        lines.append(f"best at the first or the last rate, so another rate may be better: {', '.join(ends)}")
    for line in [*lines, verdict(rows, reference_of(runs), to_loss=to_loss)]:
        if line:
            show.say(console, line)


def caption(runs: Sequence[Logged], among: Sequence[Logged]) -> str:
    """What was trained, and where. Settings that differ among all runs are told, too."""
    setting, everything = runs[0].setting, [asdict(run.setting) for run in among]
    own = {name: value for name, value in asdict(setting).items() if name not in (*TOLD, *VARIED)}
    words = [setting.task]
    words += [f"{name} {_tell(own[name])}" for name in own if len({str(s[name]) for s in everything}) > 1]
    words += [show.count(setting.workers, "worker"), show.count(setting.steps, "step")]
    if setting.link:
        words.append(f"{setting.link} ({PLACES[setting.where]})")
    elif len({run.setting.where for run in among}) > 1:
        words.append(UNLINKED[setting.where])
    return ", ".join([*words, show.count(len({run.setting.seed for run in runs}), "seed")])


def _tell(value: object) -> str:
    return " and ".join(value) or "none" if isinstance(value, tuple) else str(value or "default")


def _columns(rows: Sequence[Row], to_loss: float | None) -> dict[str, Callable[[Row], str]]:
    """By heading, what a row shows."""

    def maybe(value: float | None, form: str, missing: str = "") -> str:
        return missing if value is None else form.format(value)

    searched = len({rate for row in rows for rate, _ in row.rates}) > 1
    goal = "ref. loss" if to_loss is None else f"loss {to_loss:g}"
    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: row.method,
        "lr": lambda row: maybe(row.lr, "{:g}") if searched else "",
        "loss": lambda row: f"{row.loss:.4f}" + maybe(row.spread, " ± {:.4f}"),
        "accuracy": lambda row: maybe(row.accuracy, "{:.1%}"),
        "seconds": lambda row: f"{row.seconds:.2f}",
        "exposed s": lambda row: f"{row.exposed:.2f}",
        "hidden s": lambda row: f"{row.hidden:.2f}",
        "MB/worker": lambda row: f"{row.megabytes:.2f}",
        "rounds": lambda row: f"{row.rounds:.1f}".removesuffix(".0"),
        "MB on the wire": lambda row: maybe(row.kernel_megabytes, "{:.2f}"),
        f"s to {goal}": lambda row: maybe(row.reached, "{:.2f}", "never"),
        f"MB to {goal}": lambda row: maybe(row.reached_megabytes, "{:.2f}", "never"),
        "speed-up": lambda row: maybe(row.speedup, "{:.2f}×"),
    }
    if to_loss is None:
        del columns[f"MB to {goal}"]
    if len(rows) == 1:  # there is nothing to compare it with
        left_out = ["speed-up", *([f"s to {goal}"] if to_loss is None else [])]
        columns = {heading: tell for heading, tell in columns.items() if heading not in left_out}
    return columns
