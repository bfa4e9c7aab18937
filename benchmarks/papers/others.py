"""One table for each of the other papers: ADPSGD, AdaComm, DaSGD, CoCoD, DEF, A2SGD, DES-LOC and SNOO.

    scripts/bench papers/others              # digits, four workers
    scripts/bench papers/others --list       # what is missing, and how long it takes
    scripts/bench papers/others --table      # what the log says

CoDA has a script of its own, coda.py. benchmarks/coding/clusters.py measures the dynamic clusters of GC-DC.
"""

from __future__ import annotations

from dataclasses import replace

from study import Cell, Found, Log, Section, Study, list_columns, loss_at, main

SLOW = Cell("", link=50.0)  # a mean takes about a step
ADAMW = Cell("", optimizer="adamw")
PAPERS = {
    "ADPSGD: periods that follow the drift": (
        "An adaptive period against constant ones; compare the share of the bytes of `ddp()`.",
        Cell(""),
        [
            "ddp()",
            "adaptive(start=4, sample=75)",
            "local_sgd(every=4)",
            "local_sgd(every=8)",
            "local_sgd(every=16)",
        ],
    ),
    "AdaComm: periods that follow the loss": (
        "On links of 50 Mbit/s, steps of 5 ms. The equal time is that of the first contender to end.",
        SLOW,
        [
            "ddp()",
            "adacomm(start=16, interval=30)",
            "local_sgd(every=16)",
            "local_sgd(every=4)",
            "local_sgd(every=1)",
        ],
    ),
    "DaSGD and CoCoD: delayed averages": (
        "On links of 50 Mbit/s, steps of 5 ms. The equal time is that of the first contender to end.",
        SLOW,
        [
            "ddp()",
            "local_sgd(every=4)",
            "local_sgd(every=4, delay=2)",
            "dasgd(every=4, delay=2)",
            "cocod(every=4, delay=2)",
        ],
    ),
    "DEF: detached error feedback": (
        "A sixteenth of the displacement is sent, with and without the offset of DEF.",
        Cell(""),
        [
            "ddp()",
            "def_sgd(ratio=16)",
            "def_sgd(ratio=16, lam=0.0)",
            "local_sgd(every=16)",
        ],
    ),
    "A2SGD: two numbers per step": (
        "Two numbers per step between averages, against averages alone.",
        Cell(""),
        ["ddp()", "a2sgd(every=32)", "local_sgd(every=32)", "a2sgd(every=8)", "local_sgd(every=8)"],
    ),
    "DES-LOC: moments less often": (
        "AdamW. Moments averaged with every round, every third and sixth, or never.",
        ADAMW,
        ["ddp()", "local_sgd(every=16, moments='average')", "desloc(every=16)", "local_sgd(every=16)"],
    ),
    "SNOO: the outer step on top of synchronous training": (
        "AdamW.",
        ADAMW,
        ["ddp()", "snoo(every=20)", "snoo(every=20, ramp=0)"],
    ),
}
CELLS = list(
    dict.fromkeys(replace(base, method=name) for _, base, names in PAPERS.values() for name in names)
)


def tell(study: Study, log: Log) -> list[Section]:
    sections = []
    for title, (text, base, methods) in PAPERS.items():
        cells = [replace(base, method=method) for method in methods]
        found = [each for cell in cells if (each := study.find(log, cell)) is not None]
        ends = min((each.mean("seconds") for each in found), default=0.0)

        def then(each: Found, ends: float = ends) -> str:
            return f"{sum(loss_at(row, 1.001 * ends) for row in each.rows) / len(each.rows):.4f}"

        columns = {
            "loss": lambda each: each.show("loss"),
            "accuracy, %": lambda each: each.show("accuracy", ".1%"),
            "share, %": lambda each: f"{each.mean('share'):.1%}".removesuffix("%"),
        }
        if base.timed:
            columns |= {"seconds": lambda each: f"{each.mean('seconds'):.2f}", "loss at equal time": then}
        sections.append(Section(title, text, list_columns(study, log, cells, columns)))
    return sections


STUDY = Study("others", CELLS, tell)

if __name__ == "__main__":
    main(STUDY, __doc__)
