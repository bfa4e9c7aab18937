"""Numbers with units: one grammar, and one sentence for what is outside of it, in every command."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from sentences import says

import offbeat.app.cli.app
import offbeat.app.commands.compare
import offbeat.app.commands.lab
import offbeat.app.commands.plan
import offbeat.app.commands.train
import offbeat.base.units
from offbeat.app.runs.folder import setting_of
from offbeat.app.runs.setting import Setting
from offbeat.base.errors import BadArgument, show
from offbeat.base.units import (
    Link,
    Straggler,
    as_bytes,
    as_rate,
    as_time,
    parse_count,
    parse_level,
    parse_link,
    parse_rate,
    parse_seconds,
    parse_straggler,
)
from offbeat.lab import Lab
from offbeat.plan import Cluster
from offbeat.simulate import Constant, Network, Stragglers
from offbeat.simulate.compute import Late

TIMES = {
    "0.25": 0.25, "20ms": 0.02, "5us": 5 * 1e-6, "0.5s": 0.5, "10min": 600.0, "10m": 600.0, "2h": 7200.0,
    "1e-3": 1e-3, " .5 s ": 0.5, "2.": 2.0, "8760h": 8760 * 3600.0,
}  # fmt: skip
RATES = {
    "100mbit": 10**8, "100MBit": 10**8, ".5kbit": 500, "12.5mbps": 10**8, "3mibit": 3 * 2**20, "1000": 1000,
    "1000tbit": 10**15,
}  # fmt: skip
LINKS = {
    "100mbit": Link(12.5e6),
    "100mbit,20ms": Link(12.5e6, 0.02),
    "100mbit,0.02": Link(12.5e6, 0.02),
    "1gbit, 2min": Link(125e6, 120.0),
    "12.5mbps,100us": Link(12.5e6, parse_seconds("100us")),
    "8kbit,1h": Link(1000.0, 3600.0),
}
STRAGGLERS = {
    "rank=1,delay=300ms,every=4": Straggler(0.3, rank=1, every=4),
    "rank=1, delay=0.3": Straggler(0.3, rank=1),
    "share=0.1,delay=300ms": Straggler(0.3, share=0.1),
    "delay=2min,share=1,seed=7": Straggler(120.0, share=1.0, seed=7),
}

_TIME = "a time is a number and perhaps a unit, such as 0.25, 5us, 20ms, 0.5s, 10min or 2h."
_LATE = "write rank=1,delay=300ms,every=4 for one worker, or share=0.1,delay=300ms for any"
_LINK = "a link is a rate and perhaps a latency, such as 100mbit or 100mbit,20ms."
_YEAR = "a time must be at most a year, 8760h."
BAD_TIMES = {
    **dict.fromkeys(
        ["", " ", "soon", "-5ms", "+5ms", "5 parsecs", "nan", "inf", "1e", "1,5", "٣ms", "5MS"], _TIME
    ),
    **dict.fromkeys(["8761h", "1e308", "1e999", "9" * 300 + "s"], _YEAR),
    "9" * 500: _TIME,
}
BAD_LINKS = {
    **{
        bare: f"a number without a unit means bits per second: write {bare}mbit or {bare}gbit."
        for bare in ("1", "100", ".5", "999.9")
    },
    **dict.fromkeys(["", ",", "100bananas", "100m", "-5mbit", "1e3bit", "nan", "inf", "٣mbit"], _LINK),
    **dict.fromkeys(["0mbit", "1001tbit", "9" * 300], "a rate must be from 1bit to 1000tbit."),
    **{f"1gbit,{time}": f"{show(time)}: {sentence}" for time, sentence in BAD_TIMES.items()},
}  # fmt: skip
BAD_STRAGGLERS = {
    **dict.fromkeys(
        ["", "often", "0.1,1s", "rank=1", "delay=1", "share=0.1", "rank=1,share=1,delay=1", "who=1,delay=1",
         "rank=1,rank=1,delay=1"],
        f"{_LATE}.",
    ),
    **dict.fromkeys(
        ["rank=x,delay=1", "rank=-1,delay=1", "rank=1.0,delay=1", "rank=,delay=1", "rank=٣,delay=1",
         "rank=1,delay=1,every=-4", f"rank=1,delay=1,every={10**20}", "share=1,delay=1,seed=x"],
        f"{_LATE}; rank, every and seed are whole numbers.",
    ),
    **dict.fromkeys(
        ["share=-1,delay=1", "share=nan,delay=1", "share=often,delay=1", "share=,delay=1"],
        f"{_LATE}; share is a number from 0 to 1.",
    ),
    **dict.fromkeys(
        ["share=2,delay=1", "rank=1,delay=1,every=0", f"share={'9' * 300},delay=1"],
        "every must be at least 1, and share between 0 and 1.",
    ),
    "rank=4,delay=1": "the ranks are 0 to 3.",
    **{f"rank=1,delay={t}": f"{show(t)}: {s}" for t, s in BAD_TIMES.items() if not {",", " "} & set(t)},
}  # fmt: skip
BAD_LINKS |= {
    f"100mbit,{latency}": f"a latency without a unit means seconds: write {latency}ms or {latency}s."
    for latency in ("20", "1", "1.5", "2e3")
}
BAD_RATES = {
    text: "a rate is a number and a unit of tc, such as '100mbit', or '12.5mbps' in bytes."
    if sentence == _LINK
    else sentence
    for text, sentence in BAD_LINKS.items()
    if "," not in text
}


# The grammar.


def test_examples() -> None:
    assert doctest.testmod(offbeat.base.units) == (0, 6)


@pytest.mark.parametrize(
    ("parse", "table"),
    [(parse_seconds, TIMES), (parse_rate, RATES), (parse_link, LINKS), (parse_straggler, STRAGGLERS)],
)
def test_what_is_understood(parse: Callable[[str], Any], table: dict[str, Any]) -> None:
    assert {text: parse(text) for text in table} == table


@pytest.mark.parametrize(
    ("parse", "name", "table"),
    [
        (parse_seconds, "time", BAD_TIMES),
        (parse_rate, "rate", BAD_RATES),
        (parse_link, "link", BAD_LINKS),
        (lambda text: parse_straggler(text, workers=4), "straggler", BAD_STRAGGLERS),
    ],
)
def test_what_is_not(parse: Callable[[str], Any], name: str, table: dict[str, str]) -> None:
    for text, reason in table.items():
        with says(BadArgument, f"{name}={show(text)}: {reason}"):
            parse(text)


def test_counts_and_levels() -> None:
    counts = {"350_000": 350_000, "124M": 124 * 10**6, "1.3B": 13 * 10**8, "2k": 2000, "1000T": 10**15}
    assert {text: parse_count(text) for text in counts} == counts
    for text in ("", "many", "-5", "nan", "1e9", "٣", "1.2.3", "_", "9" * 5000):
        with pytest.raises(BadArgument, match="a count is a number and perhaps a unit, such as 350000, 124M"):
            parse_count(text)
    for text in ("1001T", "9" * 300):
        with pytest.raises(BadArgument, match=r"a count must be at most 1000T\."):
            parse_count(text)
    assert parse_level("8:80gbit,5us") == (8, Link(1e10, parse_seconds("5us")))
    for text in ("8", "8:", ":1gbit", "²:1gbit", "-8:1gbit", f"{10**20}:1gbit"):
        with pytest.raises(BadArgument, match="a level is the workers in a group and their uplink, such as"):
            parse_level(text)
    with says(BadArgument, f"level='8:1gbit,soon': 'soon': {_TIME}"):
        parse_level("8:1gbit,soon")


def test_how_figures_are_told() -> None:
    assert [as_rate(b) for b in (1e12, 12.5e6, 100, 1)] == ["8 Tbit/s", "100 Mbit/s", "800 bit/s", "8 bit/s"]
    assert [as_time(s) for s in (0.5, 119, 120, 7200, 172_800)] == ["0.5 s", "119 s", "2 min", "2 h", "2 d"]
    assert [as_time(s) for s in (2e-5, 4e-7, 6e-10, 2.78e-15)] == ["20 µs", "400 ns", "0.6 ns", "0 s"]
    assert [as_bytes(b) for b in (12, 1.5e3, 2e12)] == ["12 B", "1.5 kB", "2 TB"]


def test_no_figure_has_an_exponent() -> None:
    """What rounds up to the next unit is told in it, and very large figures have commas."""
    assert [as_rate(b) for b in (999.6e6 / 8, 1e20)] == ["1 Gbit/s", "800,000,000 Tbit/s"]
    assert [as_time(s) for s in (119.9, 1160 * 86400, 1e5 * 31_557_600)] == ["2 min", "3.18 y", "100,000 y"]
    assert [as_bytes(b) for b in (999_900, 5e15)] == ["1 MB", "5,000 TB"]
    for power in range(-20, 25):
        for tell in (as_rate, as_time, as_bytes):
            assert "e" not in tell(9.996 * 10.0**power), power


def test_when_a_straggler_is_late() -> None:
    fixed = Straggler(0.3, rank=1, every=4)
    assert [step for step in range(12) if fixed.seconds(1, step)] == [3, 7, 11]
    assert not any(fixed.seconds(0, step) for step in range(12))
    drawn = Straggler(0.2, share=0.25)
    late = [(rank, step) for rank in range(4) for step in range(500) if drawn.seconds(rank, step) == 0.2]
    assert 400 < len(late) < 600
    assert {rank for rank, _ in late} == {0, 1, 2, 3}


def test_the_plan_has_the_same_worker_late_in_the_same_steps() -> None:
    fixed = Straggler(0.5, rank=1, every=3)
    planned = Late(Constant(1.0), 1, 0.5, 3)
    for rank in range(3):
        for step in range(9):
            assert planned(rank, step) == 1.0 + fixed.seconds(rank, step)


def test_a_run_parses_its_stragglers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(method="ddp()", straggler=("rank=1,delay=2,every=3", "rank=1,delay=1"))
    assert [setting.late(1, step) for step in range(4)] == [1, 1, 3, 1]

    def again(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("parsed again")

    monkeypatch.setattr(offbeat.app.runs.setting, "parse_straggler", again)
    assert [setting.late(1, step) for step in range(4)] == [1, 1, 3, 1]
    assert setting == Setting(method="ddp()", straggler=setting.straggler)


# Every command that has the option.


class Ready(BaseException):
    """All options have been read, and the work would begin."""

    def __init__(self, read: Any) -> None:
        self.read = read


class Unopened(Lab):
    def __enter__(self) -> Lab:
        raise Ready(parse_rate(self.rate or ""))


def ready(*args: Any, **kwargs: Any) -> Any:
    raise Ready(args)


CALLS = {
    "train": ["ddp()", "--checkpoint-dir", "here"],
    "compare": ["ddp()", "--out", "here", "--simulate"],
    "plan": ["--workers=4", "--step=1s", "--parameters=1M", "--link=1gbit", "--steps=8", "--failures=1"],
    "lab": ["--", "true"],
}


@pytest.fixture
def read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """What a command reads from an option: its value, or the sentence with which it is refused."""
    monkeypatch.chdir(tmp_path)
    for module in (offbeat.app.commands.train, offbeat.app.commands.compare):
        monkeypatch.setattr(module, "launch", ready)
        monkeypatch.setattr(module, "check", offbeat.app.runs.setting.check)
    monkeypatch.setattr(offbeat.app.runs.setting, "_check_method", lambda setting, task: None)
    monkeypatch.setattr(offbeat.app.commands.plan, "plan", ready)
    monkeypatch.setattr(offbeat.app.commands.lab, "Lab", Unopened)
    monkeypatch.setattr(offbeat.app.commands.lab, "unavailable", lambda: None)

    def answer(command: str, option: str, text: str) -> Any:
        try:
            others = [word for word in CALLS[command] if not word.startswith(f"{option}=")]
            code = offbeat.app.cli.app.run([command, f"{option}={text}", *others])
        except Ready as reached:
            return reached.read
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        return err.removeprefix("offbeat: ").removesuffix("\n")

    return answer


def commands_with(option: str) -> list[str]:
    found: Any = typer.main.get_command(offbeat.app.cli.app.app)
    return [name for name, command in found.commands.items() if any(option in p.opts for p in command.params)]


def test_the_commands_that_have_them() -> None:
    for option in ("--link", "--straggler"):
        lab = ["lab"] if option == "--link" else []
        assert sorted(commands_with(option)) == ["compare", *lab, "plan", "train"]
    assert commands_with("--rate") == ["lab"], "the former name still works"


OPTIONS = {
    "--link": BAD_LINKS,
    "--straggler": BAD_STRAGGLERS,
    "--step": BAD_TIMES,
    "--restart": BAD_TIMES,
    "--checkpoint": BAD_TIMES,
    "--compute": BAD_TIMES,
}


@pytest.mark.parametrize(
    ("command", "option"),
    [  # the fast part runs one command for each option
        pytest.param(command, option, marks=pytest.mark.slow if number else [])
        for option in OPTIONS
        for number, command in enumerate(commands_with(option))
    ],
)
def test_bad_text_gets_the_same_sentence_everywhere(
    read: Callable[..., Any], command: str, option: str
) -> None:
    for text, reason in OPTIONS[option].items():
        sentence = f"{option} {show(text)}: {reason}"
        assert read(command, option, text) == " ".join(sentence.split())


@pytest.mark.parametrize("command", ["train", "compare", "plan"])
def test_good_text_means_the_same_everywhere(read: Callable[..., Any], command: str, tmp_path: Path) -> None:
    def run_of(option: str, text: str, place: int) -> Setting | Cluster:
        CALLS[command] = [word.replace("here", f"here{place}") for word in CALLS[command]]
        reached = read(command, option, text)
        CALLS[command] = [word.replace(f"here{place}", "here") for word in CALLS[command]]
        return reached[2] if command == "plan" else setting_of(reached[0][0])

    for place, (text, link) in enumerate(LINKS.items()):
        made = run_of("--link", text, place)
        if isinstance(made, Cluster):
            assert made.network == Network(link.latency, link.rate, "ring")
        else:
            assert made.link == text
            assert parse_link(made.link) == link
    for place, (text, late) in enumerate(STRAGGLERS.items(), start=100):
        made = run_of("--straggler", text, place)
        if isinstance(made, Setting):
            assert made.stragglers == (late,)
        elif late.share is not None:
            assert made.compute == Stragglers(Constant(1.0), late.share, late.delay, late.seed)
        else:
            assert made.compute == Late(Constant(1.0), late.rank, late.delay, late.every)


def test_the_rate_of_a_lab(read: Callable[..., Any]) -> None:
    assert {text: read("lab", "--link", text) for text in ("100mbit", "12.5mbps")} == {
        "100mbit": 10**8,
        "12.5mbps": 10**8,
    }
