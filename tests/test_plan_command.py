"""`offbeat plan`: its table, its JSON, its picture, what it measures, and one sentence for nonsense."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import warm

from offbeat import Constant, Network, Recorded, simulate
from offbeat.app.cli.app import run
from offbeat.app.commands.plan import _row
from offbeat.comm.communicator import Communicator
from offbeat.plan import Cluster, Job, measure, plan
from offbeat.plan.measure import measure_link

GIVEN = ("--workers", "4", "--step", "100ms", "--parameters", "1M", "--link", "48mbit,1ms", "--steps", "64")


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = outcome(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "ddp()", "local_sgd(every=8)", *GIVEN)
    assert code == 0
    assert "64 steps on 4 workers" in out
    assert "local_sgd(every=8) is" in out
    assert "times as fast as ddp()" in out
    assert "48 kbit/s" in out  # the chart goes from a thousandth of the link
    assert "a  local_sgd(every=8)" in out


def test_ddp_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """However it is written."""
    for methods in (["ddp"], ["ddp()"], ["ddp", "ddp()"], [" ddp( )"]):
        answer = told(capsys, *methods, *GIVEN)
        (alone,) = answer["predictions"]
        assert (alone["break_even"], alone["ddp_needs"]) == (None, None)
        assert answer["why"].startswith(f"{alone['method']} waits for messages or slower workers in 91% of")
    answer = told(capsys, "ddp", "local_sgd(every=8)", *GIVEN)
    assert [p["ddp_needs"] is None for p in answer["predictions"]] == [False, True]
    same = told(capsys, "ddp", "local_sgd(every=8)", *GIVEN[:-3], "1tbit", "--steps", "64")["why"]
    assert same.count("ddp") == 1, same


@pytest.mark.slow
def test_figures_of_the_table_have_no_exponents(capsys: pytest.CaptureFixture[str]) -> None:
    for link, steps in (("1mbit", "10000"), ("999.9mbit", "64"), ("1gbit", "64")):
        words = ("--workers", "4", "--step", "100ms", "--parameters", "124M", "--link", link)
        _, out, _ = outcome(capsys, "ddp", "local_sgd(every=8)", *words, "--steps", steps)
        assert not re.findall(r"\de[+-]\d", out)
        assert all(line.split("│")[5].strip() == "0" for line in out.splitlines() if line.startswith("│"))


def test_a_spread_that_is_only_rounding_is_none() -> None:
    cluster = Cluster(4, Constant(0.1), Network(bandwidth=1e8))
    (found,) = plan(["ddp()"], Job(64, 1_000_000), cluster).predictions
    spreads = [
        _row(replace(found, spread=spread))[4] for spread in (0.0, 2.78e-15, 1e-7 * found.seconds, 0.5)
    ]
    assert spreads == ["0", "0", "0", "0.5 s"]


@pytest.mark.parametrize("width", [120, 80, 40])
def test_nothing_is_cut_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = outcome(capsys, "ddp()", "local_sgd(every=8)", *GIVEN)
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    chart = [line for line in out.splitlines() if " ┤" in line]
    assert len(chart) == 16
    assert width - 1 <= max(map(len, chart)) <= width, "and all the room is used"
    for word in ("wall-clock", "stragglers", "local_sgd(every=8)", "48 kbit/s", "48 Gbit/s"):
        assert word in out


def test_json_and_figures_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """6 MB at 6 MB/s are a second, a ring of four has six latencies: 64 · (0.1 + 1.006), and the start."""
    answer = told(capsys, "ddp()", "local_sgd(every=8)", *GIVEN, "--backward", "0")
    fast, slow = answer["predictions"]
    assert (fast["method"], slow["method"]) == ("local_sgd(every=8)", "ddp()")
    assert slow["seconds"] == pytest.approx(64 * 1.106 + 0.5, rel=0.002)
    assert slow["rounds"] == 64
    assert fast["ddp_needs"] > 6e6
    assert len(fast["curve"]) == 13
    assert answer["why"].startswith("local_sgd(every=8)")


def test_ddp_overlaps_with_the_backward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """The longer the pass, the more of the messages it hides. The output says what was assumed."""
    seconds = {
        share: told(capsys, "ddp", *GIVEN, "--backward", share)["predictions"][0]["seconds"]
        for share in ("0", "0.5", "1")
    }
    assert seconds["0"] > seconds["0.5"] > seconds["1"]
    _, out, _ = outcome(capsys, "ddp", *GIVEN, "--backward", "0.5")
    assert "during the backward pass, which takes 50% of a step" in " ".join(out.split())
    _, out, _ = outcome(capsys, "ddp", *GIVEN, "--backward", "0")
    assert "ddp: its gradients leave after the backward pass." in out
    code, out, err = outcome(capsys, "ddp", *GIVEN, "--backward", "1.5")
    assert (code, out, err) == (2, "", "offbeat: --backward 1.5: backward must be from 0 to 1.\n")


@pytest.mark.slow
def test_the_plan_says_what_is_known_about_quality(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ("ddp", "diloco(every=64)", "diloco(every=16)", "ddp(delay=1)", "ssd_sgd")
    code, out, _ = outcome(capsys, *methods, *GIVEN)
    assert code == 0
    assert "This predicts time, not quality." in out
    said = dict(re.findall(r"^  (\S+)  +(.*)$", out, re.MULTILINE))
    assert re.fullmatch(r"\+\d+\.\d% \(diloco\(every=16\), \d seeds?\)", said["diloco(every=64)"])
    assert said["diloco(every=16)"] == said["diloco(every=64)"].replace("diloco(every=16), ", "")
    assert said["ddp"] == "the reference"
    assert said["ddp(delay=1)"] == "not measured like this"
    assert said["ssd_sgd"] == "not measured"
    known = {p["method"]: p["measured_loss"] for p in told(capsys, *methods, *GIVEN)["predictions"]}
    assert known["ssd_sgd"] is None
    assert 0 < known["diloco(every=64)"]["above_ddp"] < 0.1


def test_verbose_prints_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "ddp", *GIVEN, "--verbose")
    for line in ("  parameters = 1000000", "  layers = 12", "  workers = 4"):
        assert line in out.splitlines()


def test_a_cluster_file_that_raises_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("cluster = Cluster(4)\n")
    code, out, err = outcome(capsys, "ddp()", "--cluster", str(tmp_path / "mine.py"))
    assert (code, out) == (2, "")
    assert err.startswith("offbeat: --cluster '")
    assert err.endswith("mine.py': this file cannot be read (NameError: name 'Cluster' is not defined).\n")


def test_without_methods_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(told(capsys, *GIVEN)["predictions"]) == 5


@pytest.mark.slow
def test_what_the_options_mean(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {}
    for name, options in {
        "plain": (),
        "jitter": ("--jitter", "0.3"),
        "tail": ("--tail", "1.5"),
        "straggler": ("--straggler", "share=0.1,delay=1s"),
        "failures": ("--failures", "10", "--restart", "2min", "--checkpoint", "1min"),
        "levels": ("--level", "2:4.8mbit,50ms"),
        "tree": ("--reduce", "tree"),
        "double": ("--dtype", "float64"),
    }.items():
        seconds[name] = told(capsys, "ddp()", *GIVEN, *options)["predictions"][0]["seconds"]
    plain = seconds.pop("plain")
    assert all(value > plain for value in seconds.values()), seconds
    assert seconds["double"] == pytest.approx(plain + 64 + 0.5, rel=0.01)
    assert seconds["failures"] == pytest.approx(plain * (1 + 4 * 10 / 3600 * 150), rel=0.001)


@pytest.mark.parametrize(
    ("useless", "sentence"),
    [
        (["--tail", "3", "--jitter", "0.1"], "--tail and --jitter exclude each other: leave one out."),
        (["--recorded", "x.json"], "--recorded and --step exclude each other: leave one out."),
        (["--no-cosine", "--warmup", "5"], "--no-cosine and --warmup exclude each other: leave one out."),
        (["--restart", "60s", "--checkpoint", "0s"], "--restart and --checkpoint need --failures."),
    ],
)
def test_options_that_do_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], useless: list[str], sentence: str
) -> None:
    code = run(["plan", *GIVEN, "--steps", "10", *useless])
    assert (code, *capsys.readouterr()) == (2, "", f"offbeat: {sentence}\n")


@pytest.mark.slow
def test_the_rate_reaches_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    qsr = "qsr(alpha=0.0175, base=4, warmup=100, total=936)"
    rate = ("--steps", "936", "--lr", "0.008")
    decayed = told(capsys, qsr, *GIVEN, *rate, "--warmup", "100")["predictions"][0]["rounds"]
    flat = told(capsys, qsr, *GIVEN, *rate, "--no-cosine")["predictions"][0]["rounds"]
    assert decayed < flat == 234


CLUSTER = "cluster = Cluster(8, Constant(0.5), Network(bandwidth=1e9))\n"
JOB = "job = Job(100, 1000)\n"


def written(path: Path, *lines: str) -> Path:
    names = "from offbeat import Constant, Network\nfrom offbeat.plan import Cluster, Job\n\n"
    path.write_text(names + "".join(lines))
    return path


def test_a_cluster_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "ours.py", CLUSTER, JOB)
    answer = told(capsys, "ddp()", "--cluster", str(path))
    assert answer["predictions"][0]["rounds"] == 100
    assert "workers=8" in answer["cluster"]


def test_what_a_file_leaves_open_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "ours.py", CLUSTER)
    answer = told(capsys, "ddp()", "--cluster", str(path), "--steps", "50", "--parameters", "1k")
    assert answer["predictions"][0]["rounds"] == 50
    path = written(tmp_path / "ours.py", JOB)
    answer = told(
        capsys, "ddp()", "--cluster", str(path), "--workers", "2", "--step", "1s", "--link", "1gbit"
    )
    assert "workers=2" in answer["cluster"]


@pytest.mark.parametrize(
    ("lines", "options", "sentence"),
    [
        (
            (CLUSTER, JOB),
            ("--workers", "1000", "--link", "100bananas", "--steps", "100"),
            "defines a Cluster and a Job: leave out --workers, --link, --steps, or change the file.",
        ),
        ((CLUSTER,), ("--jitter", "0", "--steps", "9"), "defines a Cluster: leave out --jitter, or change"),
        ((CLUSTER,), ("--measure", "--task", "digits"), "leave out --measure, --task, or change the file."),
        (
            (JOB,),
            ("--no-cosine", "--workers", "4"),
            "defines a Job: leave out --no-cosine, or change the file.",
        ),
    ],
)
def test_what_a_file_defines_is_not_given_twice(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lines: tuple[str, ...],
    options: tuple[str, ...],
    sentence: str,
) -> None:
    path = written(tmp_path / "ours.py", *lines)
    code, out, err = outcome(capsys, "ddp()", "--cluster", str(path), *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"offbeat: {path} defines a")
    assert sentence in err
    assert err.count("\n") == 1


def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    told(capsys, "ddp()", "local_sgd(every=8)", *GIVEN, "--draw", str(path))
    tree = ElementTree.fromstring(path.read_text())
    curves = tree.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 2
    for curve in curves:
        heights = [float(point.split(",")[1]) for point in curve.attrib["points"].split()]
        assert heights == sorted(heights)  # down the page, as the link gets faster


def test_steps_of_a_recording(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    Recorded(((0.1, 0.3),)).write(path)
    options = ("--workers", "1", "--parameters", "1M", "--link", "1gbit", "--steps", "10")
    answer = told(capsys, "ddp()", *options, "--recorded", str(path))
    assert answer["predictions"][0]["seconds"] == pytest.approx(2.0)
    gone = str(tmp_path / "gone.json")
    _, _, err = outcome(capsys, "ddp()", *options, "--recorded", gone)
    assert err == f"offbeat: --recorded {gone!r}: there is no such file.\n"
    path.write_text("[1.0]")
    _, _, err = outcome(capsys, "ddp()", *options, "--recorded", str(path))
    assert err.startswith(
        f"offbeat: --recorded {str(path)!r}: this is not a list of seconds for every worker ("
    )


NONSENSE = [
    (("--workers", "0"), "--workers 0: workers must be a whole number from 1 to 1000000."),
    (("--link=-5mbit",), "--link '-5mbit': a link is a rate and perhaps a latency"),
    (("--link", "100bananas"), "--link '100bananas': a link is a rate and perhaps a latency"),
    (("--step=-1ms",), "--step '-1ms': a time is a number and perhaps a unit"),
    (("--step", "0"), "--step '0': step must be a positive number of seconds."),
    (
        ("--parameters", "many"),
        "--parameters 'many': a count is a number and perhaps a unit, such as 350000, 124M or 1.3B.",
    ),
    (("--steps", "0"), "--steps 0: steps must be a whole number from 1 to 1000000."),
    (
        ("local_sgd(every=65)",),
        "local_sgd(every=65): there is no round in 64 steps: shorten the period or lengthen the run.",
    ),
    (
        ("--level", "8"),
        "--level '8': a level is the workers in a group and their uplink, such as 8:100gbit,5us.",
    ),
    (("--reduce", "star"), "--reduce 'star': reduce must be one of 'ideal', 'ring', 'tree', 'direct'."),
    (("--jitter=-1",), "--jitter -1.0: "),
    (("--tail", "0"), "--tail 0.0: "),
    (("--failures", "1", "--restart", "soon"), "--restart 'soon': a time is a number"),
    (("--failures", "1", "--checkpoint", "soon"), "--checkpoint 'soon': a time is a number"),
    (("--dtype", "int8"), "--dtype 'int8': choose one of 'float32', "),
    (("--layers", "0"), "--layers 0: layers must be a whole number from 1 to 1000."),
    (("--optimizer", "lion"), "--optimizer 'lion': choose one of "),
    (("--lr=-1",), "--lr -1.0: must be a positive number."),
    (("--warmup=-1",), "--warmup -1: warmup must be shorter than steps."),
    (("--straggler", "often"), "--straggler 'often': write rank=1,delay=300ms,every=4"),
    (("--cluster", "nowhere.py"), "offbeat: --cluster 'nowhere.py': there is no such file.\n"),
    (
        ("ddp()", "torch_ddp"),
        "offbeat: torch_ddp is torch's own DDP, which only `train` and `compare` run: use ddp.\n",
    ),
    (
        ("wagma(every=4, reduce=Quantized(8))",),
        "reduce=Quantized(bits=8, block=256, stochastic=False, seed=0): a lossy code would round the weights",
    ),
    (("--measure",), "--measure needs either --task or --script."),
    (("--task", "digits"), "--task needs --measure."),
    (("--model", "tiny", "--batch", "4"), "--model and --batch need --measure."),
    (("--link", "100"), "--link '100': a number without a unit means bits per second: write 100mbit or"),
    (("--level", "2:100"), "--level '2:100': a number without a unit means bits per second: write 100mbit"),
    (("--draw", "plan.png"), "--draw 'plan.png': the plot is written as SVG: name a file that ends in .svg."),
    (("--measure", "--script", "nowhere.py"), "There is no script 'nowhere.py' to measure."),
    (("--failures=-1",), "--failures -1.0: per_hour must be a finite number, 0 or more."),
    (("no_such_method()",), "`offbeat methods` lists them"),
]


@pytest.mark.parametrize(("options", "sentence"), NONSENSE, ids=[" ".join(o) for o, _ in NONSENSE])
def test_nonsense_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], sentence: str
) -> None:
    methods, rest = [o for o in options if "(" in o], [o for o in options if "(" not in o]
    code, out, err = outcome(capsys, *(methods or ["ddp()"]), *GIVEN, *rest)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert err.startswith("offbeat: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("--workers", "A cluster needs --workers, or a file with --cluster."),
        ("--step", "A cluster needs --step, or a file with --cluster."),
        ("--link", "A cluster needs --link, or a file with --cluster."),
        ("--steps", "The length of the run is missing: give --steps."),
        ("--parameters", "The size of the model is missing: give --parameters, such as 124M."),
    ],
)
def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], without: str, sentence: str) -> None:
    place = GIVEN.index(without)
    code, _, err = outcome(capsys, *GIVEN[:place], *GIVEN[place + 2 :])
    assert (code, err) == (2, f"offbeat: {sentence}\n")


# Measuring.


def test_the_step_of_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, time, torch\n"
        "model = torch.nn.Linear(30, 40)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n"
        "    time.sleep(float(sys.argv[1]))\n"
        "    model(torch.randn(2, 30)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    options = ("--workers", "2", "--link", "1gbit", "--steps", "100", "--measure", "--script", f"{path} 0.02")
    measured = told(capsys, "ddp()", *options)["measured"]
    assert measured["parameters"] == 30 * 40 + 40
    assert len(measured["seconds"]) == 20
    assert sorted(measured["seconds"])[10] > 0.02


def test_a_script_that_never_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('nothing to do')\n")
    code, _, err = outcome(capsys, *GIVEN, "--measure", "--script", str(path))
    assert (code, err) == (2, f"offbeat: '{path}' makes 0 optimizer steps; it must make at least 5.\n")


SHORT = measure._SIZES[:5]  # up to 16 MB: the longest messages take many seconds, and are timed alike


@pytest.mark.slow
def test_torchrun_measures_step_and_link(tmp_path: Path) -> None:
    words = ["plan", "ddp()", "--measure", "--task", "digits", "--steps", "50", "--json"]
    (tmp_path / "short.py").write_text(
        "import sys\n"
        "from offbeat.app.cli.app import run\n"
        "from offbeat.plan import measure\n"
        f"measure._SIZES = {SHORT}\n"
        f"sys.exit(run({words}))\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = warm.run(*command, str(tmp_path / "short.py"), env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["measured"]["link"]) >= 2
    assert answer["measured"]["parameters"] > 1000
    assert answer["predictions"][0]["rounds"] == 50
    assert "workers=2" in answer["cluster"]


def measure_short(comm: Communicator) -> tuple[Network, list[tuple[int, float]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_SIZES", SHORT)
        return measure_link(comm, repetitions=1)


def test_a_link_is_found_again(pool: Any) -> None:
    """Over the loopback, even of a busy machine: a fast network that explains what was measured."""
    network, points = pool.run(measure_short, workers=2)[0]
    assert isinstance(network, Network)
    assert min(network.links) > 1e6
    sent, seconds = points[-1]
    assert 2 * network.latency + sent / min(network.links) == pytest.approx(seconds, rel=0.2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("latency", "bandwidth"),
    [(0.0, 1e5), (0.05, 1e5), (0.4, 1e6), (1.0, 1e7)],
    ids=["slow", "slow and distant", "distant", "very distant"],
)
def test_slow_and_distant_links_are_found_again(latency: float, bandwidth: float) -> None:
    """Where even the shortest message takes long, longer ones tell latency and bandwidth apart."""
    link = Network(latency, bandwidth, "ring")
    (network, points), _ = simulate(measure_link, 2, network=link)
    assert points[0][1] > 0.5
    assert network.latency == pytest.approx(latency, abs=1e-4)
    assert min(network.links) == pytest.approx(bandwidth, rel=1e-3)
