"""SSD-SGD: how much faster than synchronous SGD, and what does it cost, with and without GLU and warm-up?

    scripts/bench papers/ssd              # digits
    scripts/bench papers/ssd --list       # what is missing, and how long it takes
    scripts/bench papers/ssd --table      # what the log says

Four workers, SGD with momentum, on links that a message of all gradients keeps busy for about a step.
benchmarks/pushpull has steps on real links, and losses on CIFAR-10.
"""

from __future__ import annotations

from dataclasses import replace

from figure import chart
from study import Cell, Found, Log, Section, Study, list_columns, main

PULLS = {30: (2, 5, 10, 20), 0: (5, 20)}  # by steps of warm-up
WARMUP = 30
RULES = {"plain": "alpha=1.0, beta=0.0", "GLU": "alpha=2.0, beta=0.5"}
BASE = Cell("", link=50.0)


def ssd(every: int, rule: str, warmup: int = WARMUP) -> str:
    return f"ssd_sgd(every={every}, warmup={warmup}, {RULES[rule]})"


METHODS = ["ddp()", "local_sgd(every=2)", "local_sgd(every=5)", f"od_sgd(warmup={WARMUP})"]
METHODS += [ssd(every, rule, warmup) for warmup in PULLS for rule in RULES for every in PULLS[warmup]]
CELLS = [replace(BASE, method=method) for method in METHODS]


def show(study: Study, log: Log, cells: list[Cell]) -> str:
    first = study.find(log, cells[0])

    def speed(found: Found) -> str:
        return "" if first is None else f"{first.mean('seconds') / found.mean('seconds') - 1:+.0%}"

    columns = {
        "accuracy, %": lambda found: found.show("accuracy", ".1%"),
        "loss": lambda found: found.show("loss"),
        "faster": speed,
    }
    return list_columns(study, log, cells, columns)


def figure(study: Study, log: Log) -> str:
    series = {
        rule: [
            (float(every), found.mean("loss"))
            for every in PULLS[WARMUP]
            if (found := study.find(log, replace(BASE, method=ssd(every, rule)))) is not None
        ]
        for rule in RULES
    }
    return chart(
        "Digits: held-out loss by steps between pulls", series, "steps between pulls", "held-out loss"
    )


def tell(study: Study, log: Log) -> list[Section]:
    text = (
        f"Digits, a perceptron of 7 210 parameters, {BASE.steps} steps of 5 ms, 4 workers, batches of 8, "
        "links of 50 Mbit/s. `alpha=1.0, beta=0.0` is without GLU. *Faster* is the gain in virtual time over "
        "`ddp()`."
    )
    return [Section("SSD-SGD: loss and speed", text, show(study, log, CELLS), {"ssd": figure(study, log)})]


STUDY = Study("ssd", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
