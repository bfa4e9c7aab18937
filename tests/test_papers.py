"""The scripts of benchmarks/papers: each lists its runs, makes one, resumes, and tells what its log says."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

import offbeat

FOLDER = Path(__file__).parent.parent / "benchmarks/papers"
NAMES = ("qsr", "palsgd", "ssd", "wagma", "tradeoffs", "others")
SHARED = ("study", "figure", "report")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports a script of the folder. Other folders have modules of the same names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in (*NAMES, *SHARED):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in (*NAMES, *SHARED):
        sys.modules.pop(name, None)


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    importlib.import_module("study").main(module.STUDY, module.__doc__)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_lists_runs_once_and_tells(name, script, monkeypatch, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    module, log = script(name), tmp_path / "log.jsonl"
    own = ("--results", str(log))
    call(module, monkeypatch, "--list", *own)
    assert f"{name}: " in capsys.readouterr().out.splitlines()[-1]
    call(module, monkeypatch, "--steps", "4", "--limit", "1", *own)
    first = log.read_text()
    assert first.count("\n") == 1
    assert {**asdict(module.CELLS[0]), "steps": 4}.items() <= json.loads(first).items()
    call(module, monkeypatch, "--steps", "4", "--limit", "1", *own)
    assert log.read_text().startswith(first)
    assert json.loads(log.read_text().splitlines()[1])["lr"] != json.loads(first)["lr"]
    call(module, monkeypatch, "--table", *own)
    assert "not run yet" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_is_a_method(name, script) -> None:  # type: ignore[no-untyped-def]
    module, study = script(name), importlib.import_module("study")
    assert len(set(module.CELLS)) == len(module.CELLS)
    for cell in module.CELLS:
        offbeat.method(study.fill(cell.method, 0.05))


def test_the_best_rate_is_that_of_the_lowest_loss_and_all_rates_are_tried_first(script, tmp_path) -> None:  # type: ignore[no-untyped-def]
    study = script("study")
    log, cell = study.Log(tmp_path / "log.jsonl"), study.Cell("ddp()")

    def add(lr: float, seed: int, loss: float | None) -> None:
        log.add({**asdict(cell), "lr": lr, "seed": seed, "loss": loss})

    add(0.1, 0, 2.0)
    add(0.2, 0, 1.0)
    assert log.best(cell, (0.1, 0.2, 0.4)) is None
    add(0.4, 0, None)
    add(0.2, 1, 3.0)
    add(0.1, 1, 0.0)
    for read in (log, study.Log(log.path)):
        found = read.best(cell, (0.1, 0.2, 0.4))
        assert (found.lr, found.edge, found.values("loss")) == (0.2, False, [1.0, 3.0])
        assert found.show("loss", ".1f") == "2.0 ± 1.4"
        assert read.best(replace(cell, steps=7), (0.1, 0.2, 0.4)) is None
    assert log.best(cell, (0.2, 0.4)).edge
    assert log.best(cell, (0.4,)).show("loss") == "diverges (1 of 1)"


def test_one_more_rate_is_tried_beyond_the_end_at_which_the_best_is(script, tmp_path) -> None:  # type: ignore[no-untyped-def]
    study = script("study")
    log, cell = study.Log(tmp_path / "log.jsonl"), study.Cell("ddp()")
    own = study.Study("own", [cell], lambda study, log: [], {"sgd": (0.1, 0.2, 0.4)})

    def add(lr: float, seed: int, loss: float) -> None:
        log.add({**asdict(cell), "lr": lr, "seed": seed, "loss": loss, "cpu": 60.0})

    assert own.missing(log, cell, 2)[:3] == [(0.1, 0), (0.2, 0), (0.4, 0)]
    for lr, loss in ((0.1, 3.0), (0.2, 2.0), (0.4, 1.0)):
        add(lr, 0, loss)
    assert (own.find(log, cell).lr, own.find(log, cell).edge) == (0.4, True)
    assert own.missing(log, cell, 2)[0] == (1.0, 0)
    add(1.0, 0, 2.5)
    assert (own.find(log, cell).lr, own.find(log, cell).edge) == (0.4, False)
    assert own.missing(log, cell, 3) == [(0.4, 1), (0.4, 2)]
    assert own.minutes(log, 3) == (2, 2.0)
    add(0.4, 1, 1.0)
    assert own.missing(log, cell, 2) == []


def test_a_rule_is_compared_with_constant_periods_that_send_as_much(script) -> None:  # type: ignore[no-untyped-def]
    between = script("qsr").between
    assert between([(0.16, 1.0), (0.04, 3.0)], 0.08) == pytest.approx(2.0)
    assert between([(0.16, 1.0), (0.04, 3.0)], 0.02) is None


def test_messages_take_half_as_long_on_links_twice_as_fast(script) -> None:  # type: ignore[no-untyped-def]
    row = {"task": "digits", "steps": 200, "curve": [[1.5, 3.0], [2.0, 2.0]]}
    assert script("palsgd").at_twice_the_rate(row)["curve"] == [[1.0, 3.0], [1.5, 2.0]]


def test_rates_in_a_call_and_over_the_steps(script) -> None:  # type: ignore[no-untyped-def]
    study = script("study")
    assert study.fill("qsr(alpha=lr*2.0, base=4)", 0.25) == "qsr(alpha=0.5, base=4)"
    assert [study.rate("cosine", step, 40) for step in (0, 1, 2, 21)] == [0.5, 1.0, 1.0, 0.5]
    assert [round(study.rate("step", step, 40), 6) for step in (19, 20, 29, 30)] == [1.0, 0.1, 0.1, 0.01]


def test_a_loss_is_found_by_its_time_and_a_time_by_its_loss(script) -> None:  # type: ignore[no-untyped-def]
    study = script("study")
    row = {"curve": [[1.0, 3.0], [2.0, 1.0], [3.0, None]]}
    assert [study.loss_at(row, seconds) for seconds in (0.5, 1.5, 9.0)] == [math.inf, 3.0, 1.0]
    assert [study.time_to(row, loss) for loss in (3.0, 2.0, 0.5)] == [1.0, 2.0, math.inf]


def test_a_chart_leaves_out_what_is_not_finite(script) -> None:  # type: ignore[no-untyped-def]
    chart = script("figure").chart
    assert chart("t", {"a": [(1.0, math.inf)]}, "x", "y") == ""
    drawn = chart("t", {"a": [(1.0, 2.0), (8.0, 3.0)], "b": [(2.0, math.inf)], "c": [(2.0, 2.5)]}, "x", "y")
    assert drawn.count("<circle") == 3
    assert ">b</text>" not in drawn


def test_a_table_leaves_out_rows_and_columns_of_which_nothing_has_been_run(script) -> None:  # type: ignore[no-untyped-def]
    pivot = script("study").pivot
    cells = {
        ("a", "1"): "x",
        ("a", "2"): None,
        ("b", "1"): None,
        ("b", "2"): "–",
        ("c", "1"): "–",
        ("c", "3"): "y",
    }
    drawn = pivot("t", "abc", "123", lambda row, column: cells.get((row, column)))
    assert drawn.splitlines()[::2] == ["| t | 1 | 3 |", "| a | x | not run yet |"]
    assert drawn.splitlines()[3:] == ["| c | – | y |"]
    assert pivot("t", "ab", "1", lambda row, column: None).count("not run yet") == 2


def test_a_surface_is_darkest_where_its_value_is_highest(script) -> None:  # type: ignore[no-untyped-def]
    surface = script("figure").surface
    assert surface("t", {("a", "1"): math.inf}, "x", ".1f") == ""
    drawn = surface("t", {("a", "1"): 1.0, ("a", "2"): 3.0, ("b", "1"): 2.0}, "x", ".1f")
    shades = [line.split('fill-opacity="')[1][:4] for line in drawn.splitlines() if "fill-opacity" in line]
    assert shades == ["0.05", "0.55", "0.30"]


def test_the_page_is_that_of_the_logs(script) -> None:  # type: ignore[no-untyped-def]
    report = script("report")
    page, figures = report.render(report.PAGE.read_text())
    assert page == report.PAGE.read_text(), "run scripts/bench papers --write"
    for name, svg in figures.items():
        assert (report.PICTURES / f"{name}.svg").read_text() == svg
