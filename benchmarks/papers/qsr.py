"""QSR: does a period that grows as 1/lr² generalize better than others, with as little communication?

    scripts/bench papers/qsr                              # digits with wrong labels
    scripts/bench papers/qsr --data cifar10-jpeg.zip --cache pictures    # and CIFAR-10, 16 × 16 pixels
    scripts/bench papers/qsr --list                       # what is missing, and how long it takes
    scripts/bench papers/qsr --table                      # what the log says

Four workers. Rules with power 1, 2 and 3 begin with the period H0 at the peak rate; all end with a round.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from figure import Points, chart
from study import Cell, Found, Log, Section, Study, main, pivot

STEPS = 300
POWERS = {"linear": 1, "quadratic": 2, "cubic": 3}
CONSTANT = (4, 8, 16, 32)
BASES = {"linear": (4,), "quadratic": (2, 4, 8), "cubic": (4,)}  # H0, by rule
SETTINGS = {
    f"{optimizer}, {decay}": Cell("", "noisy", optimizer, decay, steps=STEPS)
    for optimizer in ("sgd", "adamw")
    for decay in ("cosine", "step")
}
IMAGES = Cell("", "images", "sgd", "cosine", steps=STEPS, batch=16)


def grow(rule: str, base: int) -> str:
    """The period is `base` at the peak rate, and base·(peak/lr)^power later."""
    power = POWERS[rule]
    alpha = f"alpha=lr*{base ** (1 / power):.4f}, base={base}, total={STEPS}, warmup={STEPS // 20}"
    return f"qsr({alpha})" if power == 2 else f"local_sgd(every=QSR({alpha}, power={power}.0))"


CONTENDERS = {"every step": "ddp()"}
CONTENDERS |= {f"constant, H = {every}": f"local_sgd(every={every})" for every in CONSTANT}
CONTENDERS |= {f"{rule}, H0 = {base}": grow(rule, base) for rule in POWERS for base in BASES[rule]}
ON_IMAGES = ["every step", "constant, H = 4", "constant, H = 8", "constant, H = 16"]
ON_IMAGES += [f"{rule}, H0 = 4" for rule in POWERS]
CELLS = [replace(base, method=method) for base in SETTINGS.values() for method in CONTENDERS.values()]
CELLS += [replace(IMAGES, method=CONTENDERS[name]) for name in ON_IMAGES]


def figure(study: Study, log: Log, title: str, base: Cell) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for name, method in CONTENDERS.items():
        found = study.find(log, replace(base, method=method))
        if found is not None:
            point = (100 * found.mean("share"), 100 * found.mean("accuracy"))
            series.setdefault(name.split(",")[0], []).append(point)
    return chart(f"Noisy digits: {title}", series, "% of the bytes of ddp", "test accuracy, %")


def between(points: Points, share: float) -> float | None:
    """The value at this share of communication, on straight lines over its logarithm."""
    for (x, y), (end, other) in itertools.pairwise(sorted(points)):
        if x <= share <= end:
            return y + (other - y) * math.log(share / x) / math.log(end / x)
    return None


def excess(study: Study, log: Log, name: str, base: Cell, value: str) -> list[float] | None:
    """By seed, how far a rule is above a constant period that sends as much; None before all have run."""
    own = study.find(log, replace(base, method=CONTENDERS[name]))
    constant = [study.find(log, replace(base, method=f"local_sgd(every={every})")) for every in CONSTANT]
    if own is None or None in constant:
        return None
    found = []
    for row in own.rows:
        rows = [each for one in constant if one for each in one.rows if each["seed"] == row["seed"]]
        usual = between([(each["share"], each[value]) for each in rows], row["share"])
        found += [] if usual is None else [row[value] - usual]
    return found


def spread(values: Sequence[float], form: str) -> str:
    """The mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):+{form}} ± {error:{form}}".replace("%", "")


def against(study: Study, log: Log, settings: Iterable[Cell]) -> str:
    bases = list(settings)
    rules = [name for name in CONTENDERS if "H0" in name]

    def show(name: str, column: str) -> str | None:
        value, form = ("accuracy", ".1%") if column == "accuracy, %" else ("loss", ".3f")
        each = [excess(study, log, name, base, value) for base in bases]
        found = [one for values in each if values for one in values]
        if None in each or not found:
            return None if None in each else "–"
        return str(len(found)) if column == "runs" else spread(found, form)

    return pivot("period", rules, ["loss", "accuracy, %", "runs"], show)


def tell(study: Study, log: Log) -> list[Section]:
    def find(name: str, base: Cell) -> Found | None:
        return study.find(log, replace(base, method=CONTENDERS[name]))

    def has_run(base: Cell) -> bool:
        return any(find(name, base) for name in CONTENDERS)

    settings = {title: base for title, base in SETTINGS.items() if has_run(base)} or SETTINGS

    def table(value: str, form: str) -> str:
        def show(name: str, column: str) -> str | None:
            found = find(name, settings[column])
            return None if found is None else found.show(value, form)

        return pivot("period", CONTENDERS, settings, show)

    figures = {
        f"qsr-{title.replace(', ', '-')}": figure(study, log, title, base) for title, base in settings.items()
    }
    text = (
        "Digits with a fifth of the training labels drawn at random, a perceptron of 7 210 parameters, "
        f"{STEPS} steps of 4 workers with batches of 8. *Constant* is `local_sgd(every=H)`; the rules have "
        "the period H0·(peak/lr)^power, power 1, 2 or 3. Test accuracy in %, mean ± deviation of the seeds:"
    )
    words = (
        "The difference to constant periods, between which values are taken to be linear in the logarithm "
        "of the bytes. Mean and standard error over all settings and seeds:"
    )
    sections = [
        Section("QSR: test accuracy", text, table("accuracy", ".1%"), figures),
        Section("QSR: held-out loss", "The same runs.", table("loss", ".3f")),
        Section(
            "QSR: share of communication",
            "The same runs: bytes in % of those of `ddp()`.",
            table("share", ".1%"),
        ),
        Section(
            "QSR: against a constant period with the same bytes",
            words,
            against(study, log, settings.values()),
        ),
    ]
    if not has_run(IMAGES):
        return sections
    values = {"accuracy, %": ("accuracy", ".1%"), "loss": ("loss", ".3f"), "share, %": ("share", ".1%")}

    def show(name: str, column: str) -> str | None:
        found = find(name, IMAGES)
        return None if found is None else found.show(*values[column])

    about = "16 × 16 pixels, a residual network of 5 266 parameters, SGD, cosine."
    return [*sections, Section("QSR: CIFAR-10", about, pivot("period", ON_IMAGES, values, show))]


STUDY = Study("qsr", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
