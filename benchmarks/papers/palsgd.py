"""PALSGD: do pulls keep workers closer than DiLoCo at the same period, and how much time do they save?

    scripts/bench papers/palsgd                                   # drift and loss on digits
    scripts/bench papers/palsgd --data tinyshakespeare.txt        # and time to a loss, with a small GPT
    scripts/bench papers/palsgd --list                            # what is missing, and how long it takes
    scripts/bench papers/palsgd --table                           # what the log says

Four workers, AdamW inside. All contenders make equally many gradient steps; pulls come on top of them.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from figure import chart
from study import Cell, Found, Log, Section, Study, code, list_columns, main, pivot, time_to

PERIODS = (16, 64, 256)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
LINKS = (50.0, 100.0)
DIGITS = Cell("", optimizer="adamw", steps=512)
BYTES = Cell("", "bytes", "adamw", steps=256)
LABELS = {"`local_sgd`": "local_sgd(every={H})", "`diloco`, p = 0": "diloco(every={H})"}
LABELS |= {f"`palsgd`, p = {p}": f"palsgd(every={{H}}, p={p})" for p in SHARES}
TIMED = [
    "ddp()",
    "local_sgd(every=64)",
    "diloco(every=64)",
    "palsgd(every=64, p=0.1)",
    "palsgd(every=64, p=0.2)",
]
SLACK = 1.02  # the loss to reach: 2 % above the last of ddp


def digits(label: str, every: int) -> Cell:
    return replace(DIGITS, method=LABELS[label].replace("{H}", str(every)))


CELLS = [replace(DIGITS, method="ddp()")]
CELLS += [digits(label, every) for label in LABELS for every in PERIODS]
CELLS += [replace(BYTES, method=method, link=link) for link in LINKS for method in TIMED]


def grid(study: Study, log: Log, value: str, form: str) -> str:
    def show(label: str, column: str) -> str | None:
        found = study.find(log, digits(label, int(column.split()[-1])))
        return None if found is None else found.show(value, form)

    return pivot("method", LABELS, [f"H = {every}" for every in PERIODS], show)


def figure(study: Study, log: Log, value: str, down: str) -> str:
    series = {
        label.replace("`", ""): [
            (float(every), found.mean(value))
            for every in PERIODS
            if (found := study.find(log, digits(label, every))) is not None
        ]
        for label in LABELS
    }
    return chart(f"Digits: {down} by period", series, "period H, steps", down)


def timed(study: Study, log: Log, link: float) -> str:
    cells = [replace(BYTES, method=method, link=link) for method in TIMED]
    first = study.find(log, cells[0])

    def reach(found: Found) -> str:
        if first is None:
            return ""
        seconds = [
            time_to(row, SLACK * base["loss"]) for row, base in zip(found.rows, first.rows, strict=False)
        ]
        return "never" if max(seconds) == float("inf") else f"{statistics.mean(seconds):.1f}"

    columns = {
        "loss": lambda found: found.show("loss"),
        "seconds in all": lambda found: f"{found.mean('seconds'):.1f}",
        "seconds to the loss": reach,
    }
    return list_columns(study, log, cells, columns)


def tell(study: Study, log: Log) -> list[Section]:
    first = study.find(log, CELLS[0])
    last = f" {code('ddp()')} ends at {first.show('loss')}." if first else ""
    text = (
        f"Digits, a perceptron of 7 210 parameters, {DIGITS.steps} steps of 4 workers, batches of 8, AdamW. "
        "The root of the drift, |x − x̄|, in the mean over all rounds, just before they are applied:"
    )
    figures = {
        "palsgd-drift": figure(study, log, "drift", "drift"),
        "palsgd-loss": figure(study, log, "loss", "held-out loss"),
    }
    sections = [
        Section("PALSGD: drift", text, grid(study, log, "drift", ".3f"), figures),
        Section("PALSGD: held-out loss", f"The same runs.{last}", grid(study, log, "loss", ".4f")),
    ]
    for link in LINKS:
        words = (
            f"A GPT of 0.25 M parameters on tinyshakespeare, {BYTES.steps} steps of 0.1 s on links of "
            f"{link:g} Mbit/s, in virtual time. The loss to reach is 2 % above the last loss of `ddp()`:"
        )
        sections.append(Section(f"PALSGD: time on {link:g} Mbit/s", words, timed(study, log, link)))
    return sections


STUDY = Study("palsgd", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
