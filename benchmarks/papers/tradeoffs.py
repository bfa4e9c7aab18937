"""The trade-offs of Local SGD: test accuracy by period and number of workers, and what wins some of it back.

    scripts/bench papers/tradeoffs              # 4 to 32 virtual workers, digits
    scripts/bench papers/tradeoffs --list       # what is missing, and how long it takes
    scripts/bench papers/tradeoffs --table      # what the log says

All runs see equally many samples: twice the workers make half the steps.
"""

from __future__ import annotations

from figure import surface
from study import Cell, Log, Section, Study, main, pivot

WORKERS = (4, 8, 16, 32)
PERIODS = (1, 16, 64, 256)
SAMPLES, BATCH = 16_384, 8
PLAIN = "local_sgd(every={H})"
WORDS = {
    PLAIN: "`local_sgd`",
    "slowmo(every={H})": "`slowmo`",
    "slowmo(every={H}, ramp=0, moments='reset')": "`slowmo` as in its paper",
    "post_local_sgd(switch={half}, every={H})": "`post_local_sgd` at half of the steps",
}
RESCUED = ((8, 16), (32, 16))  # workers and periods of these


def cell(pattern: str, workers: int, every: int) -> Cell:
    steps = SAMPLES // BATCH // workers
    method = pattern.replace("{H}", str(every)).replace("{half}", str(steps // 2))
    return Cell(method, "noisy", workers=workers, steps=steps, batch=BATCH)


GRID = [(k, every) for k in WORKERS for every in PERIODS if every <= SAMPLES // BATCH // k]
CELLS = [cell(PLAIN, k, every) for k, every in GRID]
CELLS += [cell(pattern, workers, every) for workers, every in RESCUED for pattern in WORDS]
CELLS = list(dict.fromkeys(CELLS))


def grid(study: Study, log: Log, value: str, form: str) -> str:
    def show(row: str, column: str) -> str | None:
        workers, every = int(row.split()[0]), int(column.split()[-1])
        if (workers, every) not in GRID:
            return "–"
        found = study.find(log, cell(PLAIN, workers, every))
        return None if found is None else f"{found.show(value, form)}, lr {found.lr:g}"

    return pivot("", [f"{k} workers" for k in WORKERS], [f"H = {every}" for every in PERIODS], show)


def rescue(study: Study, log: Log) -> str:
    rows = {
        f"{WORDS[pattern]}, {workers} workers, H = {every}": cell(pattern, workers, every)
        for workers, every in RESCUED
        for pattern in WORDS
    }
    values = {"accuracy, %": ("accuracy", ".1%"), "loss": ("loss", ".3f"), "share, %": ("share", ".1%")}

    def show(row: str, column: str) -> str | None:
        found = study.find(log, rows[row])
        return None if found is None else found.show(*values[column])

    return pivot("method", rows, values, show)


def figure(study: Study, log: Log, value: str, scale: float, what: str, form: str) -> str:
    values = {
        (f"{k} workers", f"{every}"): scale * found.mean(value)
        for k, every in GRID
        if (found := study.find(log, cell(PLAIN, k, every))) is not None
    }
    return surface(f"Noisy digits, local_sgd: {what}", values, "period H, steps", form)


def tell(study: Study, log: Log) -> list[Section]:
    text = (
        "Digits with a fifth of the training labels drawn at random, a perceptron of 7 210 parameters, "
        + f"{SAMPLES:,}".replace(",", " ")
        + " samples in all, batches of 8, SGD. `local_sgd`: test accuracy in % and "
        "the best rate. With H = 1 it is as good as `ddp`, apart from the momentum of each worker."
    )
    return [
        Section(
            "Trade-offs: test accuracy",
            text,
            grid(study, log, "accuracy", ".1%"),
            {"tradeoffs": figure(study, log, "accuracy", 100, "test accuracy, %", ".1f")},
        ),
        Section(
            "Trade-offs: held-out loss",
            "The same runs.",
            grid(study, log, "loss", ".3f"),
            {"tradeoffs-loss": figure(study, log, "loss", 1, "held-out loss", ".3f")},
        ),
        Section(
            "Trade-offs: what wins it back",
            "SlowMo's paper has a constant momentum, `ramp=0`, and starts each period with the local "
            "momentum at zero, `moments='reset'`. With 8 workers there are 16 rounds, with 32 there are 4. "
            "The share is that of the bytes of `ddp()`.",
            rescue(study, log),
        ),
    ]


STUDY = Study("tradeoffs", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
