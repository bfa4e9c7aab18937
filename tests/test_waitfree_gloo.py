"""Wait-free rounds among real processes: random delays, kills, and threads that always end."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from conftest import Pool, processes
from killable import Crew
from ports import free_port
from test_waitfree import conserved
from torch import nn
from watch import Watched, watch

import offbeat
from offbeat import GroupReport
from offbeat.waitfree.rounds import Rounds

pytestmark = pytest.mark.slow  # real processes, many of them

PERIODS = 10  # delay patterns in a run: at each global round all meet, and another begins


def pauses(seed: int, rank: int, step: int) -> float:
    """A quarter of the steps takes longer, some of them much longer."""
    draw = random.Random(f"{seed} {rank} {step}")
    return draw.choice([0.001, 0.003, 0.01]) * draw.random() if draw.random() < 0.25 else 0.0


def settings(workers: int, seed: int) -> tuple[str, int]:
    draw = random.Random(100 * workers + seed)
    every = draw.randint(2, 6)
    size = draw.choice([None, None, 2, 3, workers])
    grace = draw.choice([None, 0.0, 0.002])
    late = ("join", "add")[seed % 2]
    return f"wagma(group_size={size}, every={every}, grace={grace}, late={late!r})", every


def fuzzed(pipe: Connection, seeds: int) -> list[Watched]:
    """Many runs, each of many periods."""
    comm = offbeat.Torch(timeout=120)
    runs = []
    for seed in range(seeds):
        expression, every = settings(comm.size, seed)
        runs.append(watch(comm, expression, PERIODS * every, lambda s, seed=seed: pauses(seed, comm.rank, s)))
    assert not others()
    return runs


def others() -> list[str]:
    """The threads of sidecars that are still alive. A pool's process may have others, of earlier tests."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("offbeat-listen", "offbeat-work")]


@pytest.mark.parametrize(
    ("workers", "seeds"),
    [(2, 4), (3, 4), (4, 6), (8, 4)],
)
def test_what_always_holds_under_random_delays(workers: int, seeds: int) -> None:
    words = Crew(processes(), workers, fuzzed, seeds).last_words()
    assert [kind for kind, _ in words] == ["result"] * workers, words
    kinds: set[str] = set()
    for seed in range(seeds):
        _, every = settings(workers, seed)
        runs = [what[seed] for _, what in words]
        Watched.check(runs, every, PERIODS * every)
        kinds |= {kind for run in runs for kind in run.kinds}
    assert {"fresh", "late"} <= kinds


def gradients(comm: offbeat.Communicator, expression: str, steps: int) -> Any:
    """With random pauses."""
    return conserved(comm, expression, steps, lambda step: pauses(7, comm.rank, step))


@pytest.mark.parametrize("grace", [0, 0.002])  # with the longer one, near-ties are not late, but pauses are
@pytest.mark.parametrize("activation", ["solo", "majority"])
def test_each_gradient_reaches_each_worker_once(pool: Pool, activation: str, grace: float) -> None:
    expression = f"eager_sgd(every=5, activation={activation!r}, grace={grace})"
    runs = pool.run(gradients, expression, 60)
    for step in range(4, 60, 5):
        produced = sum(trace[step][0] for trace, _ in runs) / 4
        assert [trace[step][1] for trace, _ in runs] == [produced] * 4
    assert any("late" in kinds for _, kinds in runs)


def kept(comm: offbeat.Communicator, expression: str, steps: int) -> tuple[list[float], list[str]]:
    """Where this worker is after each step of 2·rank + 1, with random pauses, and the kinds of its rounds."""
    x = nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=1.0)
    trace = []
    with offbeat.method(expression)(nn.ParameterList([x]), optimizer, group=comm) as sync:
        for step in range(steps):
            x.grad = torch.full_like(x, -(2.0 * comm.rank + 1))
            time.sleep(pauses(11, comm.rank, step))
            sync.step()
            low, high = x.aminmax()
            assert low == high  # no thread reads a buffer that is being written
            trace.append(low.item())
    return trace, [report.kind for report in sync.reports if isinstance(report, GroupReport)]


@pytest.mark.parametrize("grace", [0, None])
def test_with_add_no_step_is_lost(pool: Pool, grace: float | None) -> None:
    runs = pool.run(kept, f"wagma(every=6, grace={grace}, late='add')", 90)
    for step in range(6, 91, 6):
        assert [trace[step - 1] for trace, _ in runs] == [4.0 * step] * 4
    assert any("late" in kinds for _, kinds in runs)


# Loss


def endless(pipe: Connection, expression: str, seed: int) -> None:
    """Steps with random pauses until a worker is lost."""
    net = nn.Linear(50, 50)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = offbeat.method(expression)(net, opt, group=offbeat.Torch(timeout=60))
    try:
        while True:
            net(torch.randn(2, 50)).square().mean().backward()
            time.sleep(pauses(seed, dist.get_rank(), sync.steps))
            sync.step()
            opt.zero_grad()
            pipe.send(("step", sync.steps))
    finally:
        end = time.monotonic() + 30  # a thread may be inside torch while its part is left
        while others() and time.monotonic() < end:
            time.sleep(0.05)
        assert not others()


@pytest.mark.parametrize(
    ("expression", "workers", "seed"),
    [
        ("wagma(every=10)", 4, 0),
        *(pytest.param("wagma(every=10)", 4, seed, marks=pytest.mark.slow) for seed in range(1, 5)),
        *(pytest.param("wagma(every=50, grace=0)", 3, seed, marks=pytest.mark.slow) for seed in range(5, 8)),
        pytest.param("wagma(every=3, group_size=2)", 2, 8, marks=pytest.mark.slow),
        pytest.param("eager_sgd(every=10)", 3, 9, marks=pytest.mark.slow),
        pytest.param("eager_sgd(every=10, activation='majority')", 3, 10, marks=pytest.mark.slow),
        pytest.param("gradient_code(stragglers=1)", 4, 11, marks=pytest.mark.slow),
        pytest.param("gradient_code(stragglers=0)", 3, 12, marks=pytest.mark.slow),
        pytest.param("gradient_code(stragglers=1, dynamic=True)", 4, 13, marks=pytest.mark.slow),
    ],
)
def test_a_worker_killed_at_any_moment_is_missed_by_all(expression: str, workers: int, seed: int) -> None:
    draw = random.Random(seed)
    victim, moment = draw.randrange(workers), draw.randint(1, 25)
    crew = Crew(processes(), workers, endless, expression, seed)
    crew.hear(victim, lambda word: word[0] == "step" and word[1] >= moment)
    time.sleep(draw.uniform(0, 0.01))
    crew.kill([victim])
    for rank, (kind, what) in enumerate(crew.last_words()):
        if rank != victim:
            assert (kind, what[0]) == ("error", "PeerLost"), what
            assert "\n" not in what[1]
            assert "timed out after" not in what[1]  # it was noticed, not waited out


# Ends


def forgetting(comm: offbeat.Communicator) -> tuple[list[str], list[str]]:
    """A synchronizer that is never finished and no longer referenced."""
    net = nn.Linear(5, 5)
    sync = offbeat.wagma(net, torch.optim.SGD(net.parameters(), lr=0.1), every=4, group=comm)
    for _ in range(6):
        sync.step()
    comm.tell([]).wait()
    before = others()
    del sync
    gc.collect()
    return before, others()


def failing(
    comm: offbeat.Communicator, expression: str, guilty: int, interrupt: bool
) -> tuple[str, list[str]]:
    """The loop of one rank fails; no thread of any rank outlives it."""
    net = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with offbeat.method(expression)(net, optimizer, group=comm) as sync:
            for step in range(10):
                if (comm.rank, step) == (guilty, 5):
                    raise KeyboardInterrupt if interrupt else KeyError("mine")
                net(torch.ones(5)).sum().backward()
                sync.step()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", others()
    return "nothing", others()


def in_a_thread(comm: offbeat.Communicator) -> tuple[str, int, list[str]]:
    """The sidecar fails between two steps, while its worker computes; the next step raises.

    The others call to round 2 while rank 0 has made two steps. Its third waits until the thread has failed.
    """
    original = Rounds._run

    def fail(self: Rounds, round: int) -> None:
        if round == 2 and comm.rank == 0:
            raise ZeroDivisionError("in a thread")
        original(self, round)

    Rounds._run = fail
    net = nn.Linear(5, 5)
    sync = offbeat.wagma(net, torch.optim.SGD(net.parameters(), lr=0.1), every=9, grace=0, group=comm)
    try:
        for step in range(9):
            deadline = time.monotonic() + 60
            while comm.rank == 0 and step == 2 and "offbeat-work" in others():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            sync.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}", sync.steps, others()
    finally:
        Rounds._run = original
    return "nothing", sync.steps, others()


def test_a_forgotten_synchronizer_ends_its_threads(pool: Pool) -> None:
    for before, after in pool.run(forgetting, fresh=True):
        assert sorted(before) == ["offbeat-listen", "offbeat-work"]
        assert after == []


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(
    ("expression", "interrupt"),
    [
        ("wagma(every=4)", True),
        ("wagma(every=4)", False),
        ("eager_sgd(every=4, activation='majority')", False),
        ("gradient_code(stragglers=0)", False),
        ("gradient_code(stragglers=1)", False),
        ("gradient_code(stragglers=1, dynamic=True)", False),
    ],
)
def test_threads_end_with_an_error_in_the_loop(
    pool: Pool, expression: str, guilty: int, interrupt: bool
) -> None:
    """The others notice, whichever rank it is: rank 0 decides about the rounds of coded gradients."""
    answers = pool.run(failing, expression, guilty, interrupt, fresh=True)
    assert answers[guilty][0].startswith("KeyboardInterrupt" if interrupt else "KeyError")
    for rank, (error, alive) in enumerate(answers):
        assert alive == []
        assert rank == guilty or (error.startswith("PeerLost: ") and f"rank {guilty} failed" in error), error


def test_an_error_in_a_thread_is_raised_by_the_next_step(pool: Pool) -> None:
    answers = pool.run(in_a_thread, fresh=True)
    assert answers[0] == ("ZeroDivisionError: in a thread", 2, [])
    for error, _, alive in answers[1:]:
        assert error.startswith("PeerLost: "), error
        assert alive == []


def saved(comm: offbeat.Communicator) -> list[str]:
    """What the threads of two runs that follow each other leave behind, and their reports."""
    net = nn.Linear(5, 5)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = offbeat.wagma(net, opt, every=3, group=comm)
    for _ in range(6):
        sync.step()
    state, weights = sync.state_dict(), {name: t.clone() for name, t in net.state_dict().items()}
    again = offbeat.wagma(net, opt, every=3, group=comm)
    again.load_state_dict(state)
    for _ in range(3):
        again.step()
    net.load_state_dict(weights)  # a late worker's mean may have rounded them
    again.load_state_dict(state)  # while its threads run
    for _ in range(4):
        again.step()
    kinds = [report.kind for report in again.reports if isinstance(report, GroupReport)]
    assert len(again.parts[1].attendance) == comm.size
    again.finish()
    return kinds


def test_loading_and_continuing(pool: Pool) -> None:
    for kinds in pool.run(saved, fresh=True):
        assert len(kinds) == 2 + 3


SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
import offbeat

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
dist.init_process_group("gloo")
net = torch.nn.Linear(20, 20)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
sync = offbeat.wagma(net, opt, every=5)
for step in range(13):
    net(torch.randn(2, 20)).square().mean().backward()
    if step == 12 and {who}:
        {what}
    sync.step()
    opt.zero_grad()
{end}
print("done")
"""
ENDS = {  # who does what in the last step, what comes after it, and how both end
    "finish": ("False", "pass", "sync.finish()", [0, 0]),
    "forgotten": ("False", "pass", "", [0, 0]),
    "error": ("dist.get_rank() == 1", "raise KeyError('mine')", "sync.finish()", [1, 1]),
    "interrupt": (
        "True",
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
        "sync.finish()",
        [-signal.SIGINT, -signal.SIGINT],
    ),
    "exit": ("dist.get_rank() == 0", "sys.exit(3)", "sync.finish()", [3, 1]),
}


def started(script: Path) -> list[subprocess.Popen[str]]:
    """Two workers, each a separate process that shuts its interpreter down completely."""
    port = free_port()
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [warm.start(str(script), env={**shared, "RANK": str(rank)}) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("how", list(ENDS))
def test_a_process_always_ends_and_never_aborts(tmp_path: Path, how: str) -> None:
    who, what, end, codes = ENDS[how]
    (tmp_path / "script.py").write_text(SCRIPT.format(who=who, what=what, end=end))
    workers = started(tmp_path / "script.py")
    try:
        words = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == codes, words
    for code, (said, complained) in zip(codes, words, strict=True):
        for word in ("terminate called", "Fatal Python error", "Aborted"):
            assert word not in complained, complained
        if code == 0:
            assert (said, complained) == ("done\n", "")
    if how == "error":
        assert "KeyError: 'mine'" in words[1][1]
        assert "PeerLost" in words[0][1]
