"""SSD-SGD: how much faster than synchronous SGD, and what does it cost, with and without GLU and warm-up?

    scripts/bench papers/ssd                              # digits
    scripts/bench papers/ssd --data cifar10-jpeg.zip --cache pictures    # and CIFAR-10, 16 × 16 pixels
    scripts/bench papers/ssd --list                       # what is missing, and how long it takes
    scripts/bench papers/ssd --table                      # what the log says

Four workers, SGD with momentum, on links that a message of all gradients keeps busy for about a step.
"""

from __future__ import annotations

from dataclasses import replace

from figure import chart
from study import Cell, Found, Log, Section, Study, list_columns, main

PULLS = (2, 5, 10, 20)
WARMUP = 30
RULES = {"plain": "alpha=1.0, beta=0.0", "GLU": "alpha=2.0, beta=0.5"}
DIGITS = Cell("", link=50.0)
IMAGES = Cell("", "images", batch=16, link=10.0)


def ssd(every: int, rule: str, warmup: int) -> str:
    return f"ssd_sgd(every={every}, warmup={warmup}, {RULES[rule]})"


METHODS = ["ddp()", "local_sgd(every=2)", "local_sgd(every=5)", f"od_sgd(warmup={WARMUP})"]
METHODS += [ssd(every, rule, warmup) for warmup in (WARMUP, 0) for rule in RULES for every in PULLS]
ON_IMAGES = ["ddp()", *(ssd(every, rule, WARMUP) for rule in RULES for every in (2, 5, 10))]
FAST = ["ddp()", f"od_sgd(warmup={WARMUP})", *(ssd(every, "GLU", WARMUP) for every in PULLS)]
CELLS = [replace(DIGITS, method=method) for method in METHODS]
CELLS += [replace(DIGITS, method=method, link=100.0) for method in FAST]
CELLS += [replace(IMAGES, method=method) for method in ON_IMAGES]


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
    series = {}
    for warmup in (WARMUP, 0):
        for rule in RULES:
            cells = {every: replace(DIGITS, method=ssd(every, rule, warmup)) for every in PULLS}
            series[f"{rule}, warm-up of {warmup} steps"] = [
                (float(every), found.mean("loss"))
                for every, cell in cells.items()
                if (found := study.find(log, cell)) is not None
            ]
    return chart(
        "Digits: held-out loss by steps between pulls", series, "steps between pulls", "held-out loss"
    )


def tell(study: Study, log: Log) -> list[Section]:
    text = (
        f"Digits, a perceptron of 7 210 parameters, {DIGITS.steps} steps of 5 ms, 4 workers, batches of 8. "
        "`alpha=1.0, beta=0.0` is without GLU. *Faster* is the gain in virtual time over `ddp()`."
    )
    words = "16 × 16 pixels, a residual network of 5 266 parameters, steps of 50 ms."
    figures = {"ssd": figure(study, log)}
    slow = [cell for cell in CELLS if cell.link == 50.0]
    fast = [cell for cell in CELLS if cell.link == 100.0]
    pictures = [cell for cell in CELLS if cell.task == "images"]
    return [
        Section("SSD-SGD: 50 Mbit/s", text, show(study, log, slow), figures),
        Section("SSD-SGD: 100 Mbit/s", "The same on faster links.", show(study, log, fast)),
        Section("SSD-SGD: CIFAR-10", words, show(study, log, pictures)),
    ]


STUDY = Study("ssd", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
