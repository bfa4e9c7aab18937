"""PALSGD: do pulls keep workers closer than DiLoCo at the same period, and how much time do they save?

    scripts/bench papers/palsgd              # digits, AdamW inside
    scripts/bench papers/palsgd --list       # what is missing, and how long it takes
    scripts/bench papers/palsgd --table      # what the log says

Four workers. All contenders make equally many gradient steps; pulls come on top of them. Links have 50
Mbit/s, which changes times and not losses; times on 100 Mbit/s follow, since all contenders wait for their
messages.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

from figure import chart
from study import STEP, Cell, Found, Log, Section, Study, code, list_columns, main, pivot, time_to

PERIODS = (16, 64, 256)
SHARES = (0.02, 0.1, 0.5)
BASE = Cell("", optimizer="adamw", steps=512, link=50.0)
LABELS = {"`diloco`, p = 0": "diloco(every={H})"}
LABELS |= {f"`palsgd`, p = {p}": f"palsgd(every={{H}}, p={p})" for p in SHARES}
SLACK = 1.05  # the loss to reach: 5 % above the last of ddp


def find(label: str, every: int) -> Cell:
    return replace(BASE, method=LABELS[label].replace("{H}", str(every)))


FIRST = replace(BASE, method="ddp()")
PLAIN = replace(BASE, method="local_sgd(every=16)")
CELLS = [FIRST, PLAIN, *(find(label, every) for every in PERIODS for label in LABELS)]


def grid(study: Study, log: Log, value: str, form: str) -> str:
    def show(label: str, column: str) -> str | None:
        found = study.find(log, find(label, int(column.split()[-1])))
        return None if found is None else found.show(value, form)

    return pivot("method", LABELS, [f"H = {every}" for every in PERIODS], show)


def figure(study: Study, log: Log, value: str, down: str) -> str:
    series = {
        label.replace("`", ""): [
            (float(every), found.mean(value))
            for every in PERIODS
            if (found := study.find(log, find(label, every))) is not None
        ]
        for label in LABELS
    }
    return chart(f"Digits: {down} by period", series, "period H, steps", down)


def at_twice_the_rate(row: dict[str, Any]) -> dict[str, Any]:
    """The curve with messages that take half as long."""
    each = STEP[row["task"]] * row["steps"] / len(row["curve"])
    times = [(number * each, *point) for number, point in enumerate(row["curve"], 1)]
    return row | {"curve": [[busy + (at - busy) / 2, loss] for busy, at, loss in times]}


def timed(study: Study, log: Log) -> str:
    first = study.find(log, FIRST)

    def reach(found: Found, faster: bool) -> str:
        if first is None:
            return ""
        seconds = [
            time_to(at_twice_the_rate(row) if faster else row, SLACK * base["loss"])
            for row, base in zip(found.rows, first.rows, strict=False)
        ]
        reached = [each for each in seconds if math.isfinite(each)]
        if not reached:
            return "never"
        seeds = "" if len(reached) == len(seconds) else f" ({len(reached)} of {len(seconds)} seeds)"
        return f"{statistics.mean(reached):.2f}{seeds}"

    columns = {
        "loss": lambda found: found.show("loss"),
        "seconds in all": lambda found: f"{found.mean('seconds'):.2f}",
        "to the loss at 50 Mbit/s": lambda found: reach(found, False),
        "at 100 Mbit/s": lambda found: reach(found, True),
    }
    return list_columns(study, log, [FIRST, PLAIN, *(find(label, 16) for label in LABELS)], columns)


def tell(study: Study, log: Log) -> list[Section]:
    first = study.find(log, FIRST)
    last = f" {code('ddp()')} ends at {first.show('loss')}." if first else ""
    text = (
        f"Digits, a perceptron of 7 210 parameters, {BASE.steps} steps of 4 workers, batches of 8, AdamW. "
        "The root of the drift, |x − x̄|, in the mean over all rounds, just before they are applied:"
    )
    figures = {
        "palsgd-drift": figure(study, log, "drift", "drift"),
        "palsgd-loss": figure(study, log, "loss", "held-out loss"),
    }
    words = (
        "The same runs with H = 16 in virtual time: steps of 5 ms. The loss to reach is 5 % above the last "
        "loss of `ddp()` with the same seed; losses are looked at 8 times in a run. Times on 100 Mbit/s are "
        "those on 50 with messages that take half as long."
    )
    return [
        Section("PALSGD: drift", text, grid(study, log, "drift", ".3f"), figures),
        Section("PALSGD: held-out loss", f"The same runs.{last}", grid(study, log, "loss", ".4f")),
        Section("PALSGD: time to a loss", words, timed(study, log)),
    ]


STUDY = Study("palsgd", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
