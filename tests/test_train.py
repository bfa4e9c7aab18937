"""`offbeat train` and its kin on real workers: resuming, kills, Ctrl-C, torchrun, torch's DDP, the lab."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

from offbeat.app.runs.folder import CheckpointStore, entries, finished, log_path
from offbeat.app.runs.summary import read
from offbeat.lab import unavailable
from offbeat.tasks import digits_task

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
SMALL = ["--model", "tiny", "--workers", "2", "--evaluations", "3"]
needs_lab = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def quiet(*words: str) -> list[str]:
    """Without the lines of progress that a busy machine prints."""
    return ["-m", "offbeat", *words[:1], *(["--quiet"] if words[0] != "lab" else []), *words[1:]]


def offbeat(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return warm.run(*quiet(*words), env=environment(), **options)


def started(*words: str) -> subprocess.Popen[str]:
    return warm.start(*quiet(*words), env=environment(), start_new_session=True)


def until(condition: Any, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def last_step(folder: Path) -> int:
    return max((entry["step"] for entry in entries(log_path(folder, 0))), default=-1)


def end_all(command: subprocess.Popen[str]) -> None:
    """Kill the command and its workers, at once and without a word."""
    try:
        workers = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    except OSError:
        workers = []
    for process in (command.pid, *map(int, workers)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def outcome(folder: Path) -> list[tuple[Any, ...]]:
    """What two runs that are the same have in common."""
    run = read(folder)
    losses = [(e["kind"], e["step"], e["loss"]) for e in run.ranks[0] if e["kind"] in ("steps", "eval")]
    return [*losses, *[(end["weights"], end["rounds"], end["sent"], end["units"]) for end in run.ends]]


METHOD = "local_sgd(every=5, delay=3)"
LATE = ["--straggler", "share=1,delay=25ms"]  # slow enough to be hit, and otherwise the same


def saved_often(folder: Path) -> list[str]:
    often = ["--steps", "60", "--checkpoint-every", "7", "--checkpoint-dir", str(folder)]
    return ["train", METHOD, *SMALL, *often]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = offbeat(*saved_often(folder), "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["method"], row["rounds"]) == (METHOD, 12)
    return folder


def test_a_run_leaves_logs_and_checkpoints(whole: Path) -> None:
    run = read(whole)
    assert run.complete
    assert finished(whole)
    assert run.ends[0]["weights"] == run.ends[1]["weights"]
    assert [e["step"] for e in run.evals] == [0, 20, 40, 60]
    assert run.evals[-1]["loss"] < run.evals[0]["loss"]
    kept = CheckpointStore(whole / "checkpoints", rank=0, workers=2).steps()
    assert kept[-2:] == [56, 60]
    assert len(kept) <= 3, "rank 0 drops the old when it saves, perhaps before the others have saved"
    state = torch.load(whole / "checkpoints/step-000000056/rank-1.pt", weights_only=True)
    assert state["batches"] == {"step": 56}
    model = digits_task("tiny").model()
    model.load_state_dict(torch.load(whole / "model.pt", weights_only=True))
    assert checksum(model) == run.ends[0]["weights"], "the model after the last step"
    assert digits_task("tiny").evaluate(model) == pytest.approx(run.evals[-1]["loss"], rel=1e-6)
    assert run.origin["command"][:2] == ["offbeat", "train"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_at_any_moment_is_resumed_exactly(whole: Path, tmp_path: Path, seed: int) -> None:
    words = [*saved_often(tmp_path / "run"), *LATE]
    draw = random.Random(seed)
    process = started(*words)
    moment = draw.randrange(1, 50)
    try:
        until(lambda: last_step(tmp_path / "run") >= moment or process.poll() is not None)
    finally:
        end_all(process)
        process.communicate(timeout=180)
    for rank in range(2):
        for line in entries(log_path(tmp_path / "run", rank)):
            assert line["kind"] in ("steps", "round", "eval", "end")
    done = offbeat(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "run") == outcome(whole)


def checksum(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_a_finished_run_is_extended(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    done = offbeat("train", "--resume", "--checkpoint-dir", str(folder), "--steps", "70")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"torch.load({str(folder / 'model.pt')!r}, weights_only=True)" in done.stdout
    before, after = read(whole), read(folder)
    assert after.complete
    assert [e["step"] for e in after.evals] == [0, 20, 40, 69, 70]
    kept = [(e["step"], e["loss"]) for e in before.ranks[1] if e["kind"] == "steps"]
    now = [(e["step"], e["loss"]) for e in after.ranks[1] if e["kind"] == "steps"]
    assert now[:60] == kept
    assert [step for step, _ in now] == list(range(1, 71))
    assert after.ends[0]["sent"] > before.ends[0]["sent"]


def test_ctrl_c_saves_a_checkpoint_and_resuming_is_exact(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(*saved_often(folder))
    until(lambda: last_step(folder) >= 10 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=180)
    assert process.returncode == 130, error
    hint = re.fullmatch(
        r"offbeat: stopped; the last checkpoint is at step \d+: continue with offbeat (.*)\n", error
    )
    assert hint is not None, error
    saved = CheckpointStore(folder / "checkpoints", rank=0, workers=2).steps()[-1]
    assert saved == last_step(folder), "it ended with the step it saved"
    assert not list(folder.glob(".stop*"))
    done = offbeat(*hint[1].split())
    assert done.returncode == 0, done.stderr
    assert outcome(folder)[-2:] == outcome(whole)[-2:]


def test_ctrl_c_waits_for_a_rank_that_is_many_steps_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(
        "train", "local_sgd(every=256)", *SMALL, "--straggler", "rank=1,delay=0.1", "--steps", "1000",
        "--evaluations", "1", "--checkpoint-every", "0", "--checkpoint-dir", str(folder),
    )  # fmt: skip
    until(lambda: last_step(folder) >= 10 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=180)
    assert process.returncode == 130, error
    (saved,) = CheckpointStore(folder / "checkpoints", rank=0, workers=2).steps()
    assert saved >= 10
    assert error.startswith(f"offbeat: stopped; the last checkpoint is at step {saved}: ")
    assert error.count("\n") == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{saved:09d}"]
    assert not list(folder.glob(".stop*"))


def test_ctrl_c_in_the_last_step_of_a_run_does_not_let_the_next_begin(tmp_path: Path) -> None:
    process = started(
        "compare", "ddp", "local_sgd(every=2)", *SMALL, "--evaluations", "1", "--steps", "3",
        "--straggler", "rank=0,delay=4,every=3", "--out", str(tmp_path),
    )  # fmt: skip
    (first, second) = (tmp_path / "00-ddp-seed0", tmp_path / "01-local_sgd-every-2-seed0")
    until(lambda: last_step(first) >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=180)
    assert process.returncode == 130, error
    assert error == f"offbeat: stopped; to run the rest, repeat with --out {tmp_path}\n"
    assert finished(first)
    assert not log_path(second, 0).exists()


def test_another_number_of_workers_goes_on(whole: Path, tmp_path: Path) -> None:
    """Started by the command, killed, and started again by torchrun."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    words = ["train", "--resume", "--checkpoint-dir", str(folder)]
    process = started(*words, "--workers", "3", "--steps", "200", "--checkpoint-every", "5")
    try:
        until(lambda: last_step(folder) >= 72 or process.poll() is not None)
    finally:
        end_all(process)
        _, error = process.communicate(timeout=180)
    saved = CheckpointStore(folder / "checkpoints", rank=0, workers=3).steps()[-1]
    assert saved >= 65, error
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "offbeat"]
    done = warm.run(*launch, *words, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    run = read(folder)
    assert run.complete
    assert run.setting.workers == len(run.ends) == 1
    assert last_step(folder) == 200
    assert [entry["step"] for entry in run.evals] == sorted({entry["step"] for entry in run.evals})
    assert run.evals[-1]["loss"] < run.evals[0]["loss"]
    text = (folder / "rank-0.txt").read_text()
    assert f"{METHOD} continues a checkpoint of 2 workers with 3, after step 60" in text


def test_torchruns_workers_are_joined_though_their_clocks_differ(whole: Path, tmp_path: Path) -> None:
    words = ["train", METHOD, "--model", "tiny", "--evaluations", "3", "--steps", "60"]
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys, time\n"
        "from offbeat.app.cli.app import run\n"
        "real = time.strftime\n"
        "time.strftime = lambda form, *t: real(form, *t or [time.localtime(7 * int(os.environ['RANK']))])\n"
        f"sys.exit(run({[*words, '--checkpoint-every', '7']}))\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = warm.run(*launch, str(script), cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("local_sgd-*")
    assert outcome(folder) == outcome(whole)
    assert done.stdout.count("logs and checkpoints") == 1
    script.write_text(
        "import os, sys, time\n"
        "from offbeat.app.cli.app import run\n"
        "from offbeat.app.runs import folder\n"
        "finished = folder.finished\n"
        "folder.finished = lambda place: time.sleep(int(os.environ['RANK'])) or finished(place)\n"
        f"sys.exit(run({['train', '--resume', '--checkpoint-dir', str(folder), '--steps', '70']}))\n"
    )
    longer = warm.run(*launch, str(script), cwd=tmp_path, env=environment())
    assert longer.returncode == 0, longer.stderr
    assert last_step(folder) == 70
    assert read(folder).complete
    bad = warm.run(*launch, "-m", "offbeat", "train", "local_sgd(evry=1)", env=environment())
    assert bad.stderr.count("offbeat: method('local_sgd(evry=1)')") == 1


def test_torch_ddp_and_ours_end_alike_also_behind_a_link(tmp_path: Path) -> None:
    done = offbeat(
        "compare", "torch_ddp", "ddp", "local_sgd(every=10)", *SMALL, "--steps", "30", "--link", "20mbit,1ms",
        "--straggler", "rank=1,delay=20ms,every=10", "--out", str(tmp_path / "c"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs, ours, local = json.loads(done.stdout)
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    assert theirs["megabytes"] == pytest.approx(ours["megabytes"], rel=0.02)
    # 30 steps of 39 kB at 2.5 MB/s and two hops of 1 ms: no machine is faster than that.
    least = 30 * (39_208 / 2.5e6 + 0.002)
    for row in (theirs, ours):
        assert least <= row["seconds"]
        assert 0 < row["exposed"] <= row["seconds"]
        assert row["rounds"] == 30
    assert local["rounds"] == 3
    assert local["megabytes"] < ours["megabytes"] / 5


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from offbeat.tasks import Batches, Task\n"
        "def task(seed=0):\n"
        "    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))\n"
        "    y = x @ torch.tensor([1.0, 2.0, 3.0])\n"
        "    def model():\n"
        "        torch.manual_seed(seed)\n"
        "        return torch.nn.Linear(3, 1)\n"
        "    def loss(model, batch):\n"
        "        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()\n"
        "    def batches(rank, workers, batch_size, seed):\n"
        "        part = range(rank * 100 // workers, (rank + 1) * 100 // workers)\n"
        "        return Batches(part, lambda i: (x[i], y[i]), rank=rank, batch_size=batch_size, seed=seed)\n"
        "    return Task(model=model, loss=loss, batches=batches,\n"
        "                evaluate=lambda m: loss(m, (x, y)).item())\n"
    )
    curves = find_spec("tensorboard") is not None  # an extra of the user's own
    done = offbeat(
        "train", "slowmo(every=5)", "--task", "mine.py", "--workers", "2", "--steps", "40", "--lr", "0.1",
        *(["--tensorboard"] if curves else []), "--checkpoint-dir", "run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "slowmo(every=5)" in done.stdout
    run = read(tmp_path / "run")
    assert run.evals[-1]["loss"] < 0.5 * run.evals[0]["loss"]
    assert len(list((tmp_path / "run/tensorboard").glob("rank-*/events*"))) == (2 if curves else 0)


def test_a_worker_that_fails_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from dataclasses import replace\n"
        "from offbeat.tasks import digits_task\n"
        "def task(seed=0):\n"
        "    base = digits_task('tiny')\n"
        "    def loss(model, batch):\n"
        "        print('a word from the task')\n"
        "        raise ArithmeticError('the loss is on holiday')\n"
        "    return replace(base, loss=loss)\n"
        "def diverging(seed=0):\n"
        "    base = digits_task('tiny')\n"
        "    losses = iter([1, 1, 1, float('nan')])\n"
        "    return replace(base, loss=lambda model, batch: next(losses) * base.loss(model, batch))\n"
    )
    words = ["--workers", "2", "--checkpoint-dir"]
    done = offbeat("train", "ddp", "--task", "bad.py", *words, "one", cwd=tmp_path)
    assert done.returncode == 1
    sentence, *frames, output = done.stderr.splitlines()
    assert re.fullmatch(r"offbeat: Rank \d: ArithmeticError: the loss is on holiday", sentence)
    assert frames[0] == f'  File "{tmp_path / "bad.py"}", line 7, in loss'
    assert frames[-1].strip() == "raise ArithmeticError('the loss is on holiday')"
    printed = (tmp_path / output.rpartition(" ")[2]).read_text()
    assert "a word from the task\n" in printed
    assert "Traceback" in printed
    done = offbeat("train", "ddp", "--task", "bad.py:diverging", *words, "two", cwd=tmp_path)
    assert done.returncode == 1
    told = r"offbeat: Rank \d: The training loss of step 4 is nan: lower the learning rate \(--lr\), or .*\n"
    assert re.fullmatch(told, done.stderr), done.stderr


@needs_lab
@pytest.mark.xdist_group("lab")
def test_bytes_in_namespaces_agree_with_the_kernel(tmp_path: Path) -> None:
    done = offbeat(
        "compare", "torch_ddp", "local_sgd(every=5)", "--model", "medium", "--workers", "2", "--steps", "20",
        "--evaluations", "1", "--netns", "--link", "200mbit", "--out", str(tmp_path / "c"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        assert row["kernel_megabytes"] > 1
        assert row["reported_megabytes"] / row["kernel_megabytes"] == pytest.approx(0.97, abs=0.05), row[
            "method"
        ]


@needs_lab
@pytest.mark.xdist_group("lab")
def test_the_lab_runs_any_command_counts_its_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(250_000)\n"
        "dist.all_reduce(x)\n"
        "assert x.eq(2).all()\n"
        "dist.destroy_process_group()\n"
    )
    done = offbeat("lab", "--workers", "2", "--rate", "100mbit", "--json", "--", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert all(1_000_000 < run["sent"] < 1_200_000 for run in runs)
    words = [
        "--link",
        "50mbit,0ms",
        "--",
        "sh",
        "-c",
        "echo this is rank $RANK; echo $TORCH_CPP_LOG_LEVEL >&2",
    ]
    shown = offbeat("lab", "--workers", "2", *words)
    assert "this is rank 0" in shown.stdout, shown.stderr
    assert shown.stderr == "ERROR\n"  # no warnings that a lab has no names of hosts
    assert "Lab(2, rate='50mbit')" in shown.stdout
    assert "as the kernel counted" in shown.stdout
    failing = offbeat("lab", "--workers", "2", "--", sys.executable, "-c", "raise SystemExit('no')")
    assert failing.returncode == 1
    ended = "offbeat: rank 0 ended with 1: no\noffbeat: rank 1 ended with 1: no\n"
    assert failing.stderr == f"no\n{ended}"  # as rank 0 printed it, and only once
    late = offbeat("lab", "--workers", "2", "--timeout", "1", "--", "sleep", "60")
    assert late.returncode == 1
    assert "ended after 1 s (--timeout)" in late.stderr
    process = started("lab", "--workers", "2", "--", "sleep", "60")
    until(lambda: any(Path("/run/netns").glob(f"offbeat-{process.pid}-*")))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=180)
    assert process.returncode == 130
    assert not any(Path("/run/netns").glob(f"offbeat-{process.pid}-*"))
