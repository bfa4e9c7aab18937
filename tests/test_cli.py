"""The command line: its table of methods, its help, and one sentence for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import offbeat
from offbeat import catalogue
from offbeat.cli.app import run


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def entries() -> dict[str, catalogue.Entry]:
    return {entry.name: entry for entry in catalogue.catalogue()}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """In a process of their own, where nobody else holds memory."""
    command = [sys.executable, "-m", "offbeat", "methods", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {entry["name"]: entry for entry in json.loads(said)}


def test_every_method_is_in_the_catalogue_with_its_paper(entries: dict[str, catalogue.Entry]) -> None:
    assert list(entries) == offbeat.methods.__all__
    for name, entry in entries.items():
        assert entry.call.startswith(f"{name}(")
        assert entry.summary.endswith(".")
        assert entry.lines
        assert name == "ddp" or "arXiv" in entry.reference, name


@pytest.mark.parametrize(
    ("name", "rate", "copies"),
    [
        ("ddp", 1.0, 1),
        ("local_sgd", 1 / 8, 1),
        ("post_local_sgd", 1.0, 1),  # while it is synchronous
        ("hierarchical", 1.0, 2),  # with all workers in one node
        ("overlap_local_sgd", 1 / 2, 3),
        ("diloco", 1 / 64, 3),
        ("eager_diloco", 1 / 64, 5),
        ("noloco", 8 / (2 * 7) / 50, 3),
        ("palsgd", 1 / 64 / 0.9, 3),
    ],
)
def test_measured_figures_are_those_of_the_theory(
    measured: dict[str, dict[str, float]], name: str, rate: float, copies: int
) -> None:
    assert measured[name]["bytes_per_step"] == pytest.approx(rate, rel=0.06)
    assert measured[name]["copies"] == pytest.approx(copies, abs=0.02)


def test_parts_tell_what_they_are(entries: dict[str, catalogue.Entry]) -> None:
    (line,) = entries["cocod"].lines
    assert line == catalogue.Line("Every(steps=8)", "World()", "parameters", "Correct()", "4")
    assert entries["ddp"].lines[0].sent == "gradients"
    assert entries["noloco"].lines[0].among == "Pairs()"
    assert entries["overlap_local_sgd"].lines[0].delay == "round"
    assert [line.when for line in entries["palsgd"].lines][1].startswith("PseudoSync(p=0.1")
    assert len(entries["streaming_diloco"].lines) == 4


def test_a_method_that_cannot_be_simulated_is_still_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: str) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(catalogue, "_simulated", refuse)
    entry = catalogue._entry("slowmo", 1.0)
    assert (entry.bytes_per_step, entry.copies) == (None, None)
    assert entry.lines[0].applied == "SlowMo()"


def test_methods_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "methods", "diloco")
    assert (code, err) == (0, "")
    assert "diloco(every=64)" in out
    assert "0.016" in out
    assert "Douillard et al." in out
    assert "For another outer optimizer" in out, "its documentation follows"
    code, out, err = outcome(capsys, "methods", "noloco", "--json")
    (entry,) = json.loads(out)
    assert (code, err, entry["name"]) == (0, "", "noloco")
    assert entry["lines"][0]["among"] == "Pairs()"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["methods", "nope"], "There is no method 'nope': name one of a2sgd, adacomm, adaptive,"),
        (["mehtods"], "No such command 'mehtods'."),
        (["methods", "--jsn"], "No such option: --jsn"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"offbeat: {sentence}")
    assert err.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert "methods" in out
    assert outcome(capsys, "--version") == (0, f"offbeat {offbeat.__version__}\n", "")
    code, out, err = outcome(capsys)
    assert (code, err) == (2, "")
    assert "Usage" in out
    code, out, _ = outcome(capsys, "methods", "--help")
    assert code == 0
    assert "offbeat methods diloco" in out


def test_without_the_extra_one_command_installs_it() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom offbeat.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "offbeat: the command line is an extra: pip install 'offbeat[cli]'\n"


def test_completion_knows_the_commands() -> None:
    environment = {"_OFFBEAT_COMPLETE": "complete_bash", "COMP_WORDS": "offbeat met", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['offbeat']\nfrom offbeat.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "methods"
