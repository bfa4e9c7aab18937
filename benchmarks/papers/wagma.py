"""WAGMA: the loss at equal steps and at equal time with delayed workers, by group size and rule for the late.

    scripts/bench papers/wagma              # digits, eight workers
    scripts/bench papers/wagma --list       # what is missing, and how long it takes
    scripts/bench papers/wagma --table      # what the log says

In virtual time. A step takes 5 ms; with probability 1/8 it takes 30 ms.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from figure import chart
from study import Cell, Found, Log, Section, Study, list_columns, loss_at, main

BASE = Cell("", workers=8, steps=240, late=0.125)
METHODS = ["ddp()", "local_sgd(every=1)", "local_sgd(every=10)", "eager_sgd(every=10)"]
METHODS += [
    f"wagma(every={every}, group_size={size}, late='{late}')"
    for late in ("join", "add")
    for every, size in ((10, 2), (10, 4), (10, 8), (20, 4))
]
METHODS += ["wagma(every=10, group_size=4, grace=0, late='join')"]
CELLS = [replace(BASE, method=method) for method in METHODS]


def tell(study: Study, log: Log) -> list[Section]:
    every = {cell.method: study.find(log, cell) for cell in CELLS}
    first = every["ddp()"]
    # No contender is judged by a time at which another has not ended, unless that is much slower.
    ends = min((found.mean("seconds") for found in every.values() if found is not None), default=0.0)

    def speed(found: Found) -> str:
        return "" if first is None else f"{first.mean('seconds') / found.mean('seconds'):.2f}"

    def then(found: Found) -> str:
        return f"{statistics.mean(loss_at(row, 1.001 * ends) for row in found.rows):.4f}"

    columns = {
        "speed": speed,
        "loss at equal steps": lambda found: found.show("loss"),
        "loss at equal time": then,
        "accuracy, %": lambda found: found.show("accuracy", ".1%"),
        "rounds missed": lambda found: f"{found.mean('missed') / max(1, found.mean('rounds')):.1%}",
    }
    curves = {
        method: [(at, loss) for at, loss in found.rows[0]["curve"] if loss is not None]
        for method, found in every.items()
        if found is not None and ("size=4" in method or "wagma" not in method) and "grace" not in method
    }
    figures = {"wagma": chart("Digits: loss by virtual time", curves, "seconds", "held-out loss")}
    text = (
        f"Digits, a perceptron of 7 210 parameters, {BASE.steps} steps of 8 workers, SGD. Steps take 5 ms; "
        "one in eight takes 30 ms. *Speed* is relative to `ddp()`. The equal time is that of the first "
        "contender to end, when the rate of the others has not fallen as far. "
        "`late='join'` with `grace=0` is the paper's rule."
    )
    return [Section("WAGMA: delayed workers", text, list_columns(study, log, CELLS, columns), figures)]


STUDY = Study("wagma", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
