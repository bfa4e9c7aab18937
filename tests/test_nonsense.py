"""Nonsense for every option of every command and every argument of every method: a sentence, no traceback."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import offbeat
import offbeat.app.cli.app
import offbeat.app.commands.compare
import offbeat.app.commands.lab
import offbeat.app.commands.train
from offbeat import methods
from offbeat.lab import Lab
from offbeat.methods.expression import DEEPEST, LONGEST, VALUES, method
from offbeat.plan.recording import RecordingComm

COMMANDS: dict[str, Any] = typer.main.get_command(offbeat.app.cli.app.app).commands  # type: ignore[attr-defined]
NONSENSE = (
    "", "-1", "nan", "inf", "1e308", "1e999", "9" * 20, "-" + "9" * 20, "9" * 5000, "٣", "²", "None",
)  # fmt: skip
CALLS = {
    "train": ["ddp()", "--checkpoint-dir=here", "--workers=2", "--steps=2", "--model=tiny"],
    "compare": ["ddp()", "--out=here", "--workers=2", "--steps=2", "--model=tiny", "--simulate"],
    "study": ["ddp()", "--out=here", "--workers=2", "--samples=64", "--every=1", "--model=tiny"],
    "plan": ["ddp()", "--workers=2", "--step=1s", "--parameters=1k", "--link=1gbit", "--steps=2"],
    "lab": ["--workers=2", "--", "true"],
    "report": ["here"],
    "join": ["http://127.0.0.1:1/nowhere"],
}  # fmt: skip
# What is told of these names the value or the file, not the option.
TEXTS = {
    "--task",
    "--data",
    "--out",
    "--cluster",
    "--recorded",
    "--script",
    "--draw",
    "--checkpoint-dir",
    "--token",
}


class Ready(BaseException):
    """All options have been read, and the work would begin."""


def ready(*args: Any, **kwargs: Any) -> Any:
    raise Ready


class Unopened(Lab):
    def __enter__(self) -> Lab:
        raise Ready


def options(command: str) -> list[str]:
    """Those that take a value, as the command itself lists them."""
    return [
        max(parameter.opts, key=len)
        for parameter in COMMANDS[command].params
        if parameter.param_type_name == "option" and not parameter.is_flag and "--help" not in parameter.opts
    ]


def test_every_command_is_looked_at() -> None:
    assert {name for name in COMMANDS if options(name)} == set(CALLS)
    assert len(options("plan")) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command in CALLS for option in options(command)]
)
def test_an_option_is_read_or_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (offbeat.app.commands.train, offbeat.app.commands.compare):
        monkeypatch.setattr(module, "launch", ready)
    monkeypatch.setattr(offbeat.app.runs.setting, "_check_method", lambda setting, task: None)  # it is slow
    monkeypatch.setattr(offbeat.app.commands.lab, "Lab", Unopened)
    monkeypatch.setattr(offbeat.app.commands.lab, "unavailable", lambda: None)
    for number, text in enumerate(NONSENSE):
        words = [word for word in CALLS[command] if not word.startswith(f"{option}=")]
        words = [word.replace("here", f"here{number}") for word in words]
        try:
            code = offbeat.app.cli.app.run([command, f"{option}={text}", *words])
        except Ready:
            code = 0
        told = capsys.readouterr().err
        if code != 0:
            assert code == 2, (text, told)
            assert told.startswith("offbeat: "), text
            assert told.count("\n") == 1, text
            assert len(told) < 1500, text
            if option not in TEXTS and "There is no run in" not in told:
                assert option in told, (text, told)


@pytest.mark.parametrize(
    ("command", "option", "text", "sentence"),
    [
        (
            "plan",
            "--layers",
            str(10**20),
            f"--layers {10**20}: layers must be a whole number from 1 to 1000.",
        ),
        (
            "plan",
            "--steps",
            str(10**20),
            f"--steps {10**20}: steps must be a whole number from 1 to 1000000.",
        ),
        (
            "plan",
            "--workers",
            str(10**20),
            f"--workers {10**20}: workers must be a whole number from 1 to 1000000.",
        ),
        ("plan", "--jitter", "1e308", "--jitter 1e+308: jitter is a share of the step, from 0 to 100."),
        ("plan", "--tail", "inf", "--tail inf: tail must be a finite number above 1, for a finite mean."),
        ("plan", "--lr", "nan", "--lr nan: must be a positive number."),
        ("plan", "--warmup", "2", "--warmup 2: warmup must be shorter than steps."),
        ("train", "--steps", str(10**20), f"--steps {10**20}: must be at most 1000000000."),
        ("train", "--lr", "inf", "--lr inf: must be at most 1000000."),
        ("train", "--seed", str(2**63), f"--seed {2**63}: seed must be below 2**63 in size."),
        ("compare", "--seeds", "1001", "--seeds 1001: must be at most 1000."),
        ("study", "--batch", "-1", "--batch -1: must be at least 1."),
        ("study", "--every", "4,0", "--every 0: must be at least 1."),
        ("lab", "--timeout", "nan", "--timeout nan: must be a positive number of seconds."),
    ],
)
def test_what_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
    text: str,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(offbeat.app.commands.lab, "unavailable", lambda: None)
    words = [word for word in CALLS[command] if not word.startswith(f"{option}=")]
    assert offbeat.app.cli.app.run([command, f"{option}={text}", *words]) == 2
    assert capsys.readouterr().err == f"offbeat: {sentence}\n"


# Methods as text.

NEEDED = {
    "every": "8", "start": "4", "interval": "8", "sample": "8", "delay": "2", "nodes": "2", "switch": "4",
    "alpha": "0.1", "ratio": "2", "p": "0.1", "eta": "0.5", "steps": "8", "first": "Every(1)",
    "second": "Every(2)", "rank": "1", "warmup": "4",
}  # fmt: skip
VALUED = (
    "-1", "0", "1" + "0" * 18, "9223372036854775807", "-9223372036854775808", "9" * 400, "1e999", "-1e999",
    "1e308", "5e-324", "0.5", "None", "True", "''", "'x'", "()", "((),)", "((0,),)", "(0, 0)", "Every(8)",
    "Mean()", "1j", "b'x'", "...",
)  # fmt: skip


def construct(expression: str) -> None:
    """Among imagined workers, who need no process."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method(expression)(model, optimizer, group=RecordingComm(4))


def refused_in_a_sentence(expression: str) -> None:
    try:
        construct(expression)
    except (ValueError, TypeError) as error:
        told = str(error)
        assert told.endswith("."), (expression, told)
        assert ": " in told, (expression, told)
        assert "not supported between" not in told, (expression, told)
        assert "must be real number" not in told, (expression, told)
        assert len(told) < 2000, expression


def arguments_of(call: str, names: list[str], needed: set[str]) -> list[str]:
    """Calls with each of the values for each of the names, the others being as they must be."""
    found = []
    for name in names:
        for value in VALUED:
            others = [f"{other}={NEEDED[other]}" for other in sorted(needed - {name})]
            found.append(f"{call}({', '.join([*others, f'{name}={value}'])})")
    return found


@pytest.mark.few(10)
@pytest.mark.parametrize("name", methods.__all__)
def test_arguments_of_methods(name: str) -> None:
    known = methods.arguments(getattr(methods, name))
    needed = {key for key, default in known.items() if default is inspect.Parameter.empty}
    for expression in arguments_of(name, list(known), needed):
        refused_in_a_sentence(expression)


@pytest.mark.parametrize("name", VALUES)
def test_arguments_of_values(name: str) -> None:
    parameters = inspect.signature(VALUES[name]).parameters
    needed = {key for key, p in parameters.items() if p.default is inspect.Parameter.empty}
    use = "every" if issubclass(VALUES[name], offbeat.Schedule) else "reduce"
    base = "local_sgd(" if use == "every" else "local_sgd(every=8, "
    for inner in arguments_of(name, list(parameters), needed & NEEDED.keys()):
        refused_in_a_sentence(f"{base}{use}={inner})")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (
            "local_sgd(every=" + "-" * 5000 + "1)",
            f"an expression has at most {DEEPEST} levels, but this has more.",
        ),
        (
            "local_sgd(every=" + "-" * 50 + "1)",
            f"an expression has at most {DEEPEST} levels, but this has more.",
        ),
        ("(" * 5000 + ")" * 5000, f"an expression has at most {DEEPEST} levels, but this has more."),
        ("local_sgd(every=" + "[" * 90 + "]" * 90 + ")", f"an expression has at most {DEEPEST} levels, but "),
        ("ddp" + "()" * 3000, f"an expression has at most {DEEPEST} levels, but this has more."),
        ("ddp" + ".x" * 3000, f"an expression has at most {DEEPEST} levels, but this has more."),
        (
            "local_sgd(every=1" + "+1" * 3000 + ")",
            f"an expression has at most {DEEPEST} levels, but this has more.",
        ),
        ("x" * 100_000, f"an expression has at most {LONGEST} characters, but this has 100000."),
        ("local_sgd(every=" + "9" * 400 + ")", "a number of 1329 bits is too large."),
        ("local_sgd(every=9223372036854775808)", "9223372036854775808 is too large."),
        ("local_sgd(every=" + "9" * 5000 + ")", "this is not a valid expression: "),
        ("qsr(alpha=1e999)", "inf is too large."),
        ("qsr(alpha=-1e999)", "inf is too large."),
        ("local_sgd(every=1j)", "'1j' is not supported; "),
        ("local_sgd(every=8\0)", "this is not a valid expression: "),
        ("local_sgd(every='\ud800')", "this is not a valid expression: "),
    ],
    ids=range(16),
)
def test_expressions_beyond_all_bounds(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^method\(['\"]") as caught:
        method(expression)
    assert f": {reason}" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_expression_is_text() -> None:
    with pytest.raises(TypeError, match=r"^method\(8\): an expression must be a string, such as 'local_sgd"):
        method(8)  # type: ignore[arg-type]


def test_long_lists_of_ranks_are_understood() -> None:
    nodes = tuple(tuple(range(8 * i, 8 * i + 8)) for i in range(256))
    assert method(f"hierarchical(nodes={nodes})").arguments == {"nodes": nodes}


def test_whole_numbers_of_schedules_have_a_bound() -> None:
    with pytest.raises(
        ValueError, match=r"^Every\(steps=9223372036854775808\): steps must be below 2\*\*63\.$"
    ):
        offbeat.Every(2**63)
    with pytest.raises(TypeError, match=r"^diloco\(lr='x'\): lr must be a number\.$"):
        construct("diloco(every=8, lr='x')")
