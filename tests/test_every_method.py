"""Every named method on the command line, behind a slow link: none may be broken there and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import warm
from table import CODES, METHODS

import offbeat

STEPS = 8


def one_of_each() -> list[str]:
    """The first call of every method in the tables."""
    found: dict[str, str] = {}
    for expression in (*METHODS, *CODES):
        found.setdefault(expression.partition("(")[0], expression)
    assert sorted(found) == offbeat.methods.__all__
    return list(found.values())


@pytest.mark.slow
def test_every_method_trains_behind_a_link(tmp_path: Path) -> None:
    """All in one comparison, for which workers are started once; tests/test_compare.py simulates them."""
    methods = [*one_of_each(), "torch_ddp()"]
    words = ["--task", "digits", "--model", "tiny", "--workers", "2", "--steps", str(STEPS)]
    words += [
        "--evaluations",
        "1",
        "--link",
        "1gbit,10us",
        "--out",
        str(tmp_path / "runs"),
        "--json",
        "--quiet",
    ]
    done = warm.run("-m", "offbeat", "compare", *methods, *words, timeout=540)
    # DES-LOC says that SGD has no second moments.
    said = [line for line in done.stderr.splitlines() if not line.startswith("moments('exp_avg_sq'")]
    assert (done.returncode, said) == (0, [])
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert row["rounds"] >= 1, row["method"]
        assert row["megabytes"] > 0, row["method"]
        assert row["loss"] < 10, row["method"]  # which is not true of NaN
