"""QSR: does a period that grows as 1/lr² generalize better than others, with as little communication?

    scripts/bench papers/qsr                              # digits with wrong labels
    scripts/bench papers/qsr --data cifar10-jpeg.zip --cache pictures    # and CIFAR-10, 16 × 16 pixels
    scripts/bench papers/qsr --list                       # what is missing, and how long it takes
    scripts/bench papers/qsr --table                      # what the log says

Four workers. Rules with power 1, 2 and 3 begin with the period H0 at the peak rate; all end with a round.
"""

from __future__ import annotations

from dataclasses import replace

from figure import chart
from study import Cell, Log, Section, Study, main, pivot

STEPS = 300
POWERS = {"linear": 1, "quadratic": 2, "cubic": 3}
CONSTANT = (2, 4, 8, 16, 32)
BASES = (2, 4, 8)
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
CONTENDERS |= {f"{rule}, H0 = {base}": grow(rule, base) for rule in POWERS for base in BASES}
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


def tell(study: Study, log: Log) -> list[Section]:
    def show(name: str, column: str, value: str, form: str) -> str | None:
        base = IMAGES if column == "CIFAR-10" else SETTINGS[column]
        found = study.find(log, replace(base, method=CONTENDERS[name]))
        return None if found is None else found.show(value, form)

    figures = {
        f"qsr-{title.replace(', ', '-')}": figure(study, log, title, base) for title, base in SETTINGS.items()
    }
    accuracy = pivot("period", CONTENDERS, SETTINGS, lambda row, column: show(row, column, "accuracy", ".1%"))
    loss = pivot("period", CONTENDERS, SETTINGS, lambda row, column: show(row, column, "loss", ".3f"))
    share = pivot("period", CONTENDERS, SETTINGS, lambda row, column: show(row, column, "share", ".1%"))
    values = {"accuracy, %": ("accuracy", ".1%"), "loss": ("loss", ".3f"), "share, %": ("share", ".1%")}
    images = pivot("period", ON_IMAGES, values, lambda row, column: show(row, "CIFAR-10", *values[column]))
    text = (
        "Digits with a fifth of the training labels drawn at random, a perceptron of 7 210 parameters, "
        f"{STEPS} steps of 4 workers with batches of 8. *Constant* is `local_sgd(every=H)`; the rules have "
        "the period H0·(peak/lr)^power, power 1, 2 or 3. Test accuracy in %, mean ± deviation of the seeds:"
    )
    return [
        Section("QSR: test accuracy", text, accuracy, figures),
        Section("QSR: held-out loss", "The same runs.", loss),
        Section("QSR: share of communication", "The same runs: bytes in % of those of `ddp()`.", share),
        Section(
            "QSR: CIFAR-10", "16 × 16 pixels, a residual network of 5 266 parameters, SGD, cosine.", images
        ),
    ]


STUDY = Study("qsr", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
