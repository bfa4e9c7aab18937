"""Processes killed at any moment: the survivors notice, and the run begun again equals one left alone."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from conftest import Pool, processes
from killable import Crew, halt, send_much, stall, stay_away, train, train_many
from table import BROAD, METHODS, SAVE_EVERY

import offbeat
from offbeat.comm import monitor as monitor_module
from offbeat.comm.monitor import NumberWait
from offbeat.comm.presence import Departure
from offbeat.comm.store import Silent, StoreClient

pytestmark = pytest.mark.slow  # real processes, many of them

STEPS = 12
QUICK = "local_sgd(every=3, delay=2)"
REPORT = "Waiting for all ranks to report: "

# Some need more than two workers. tests/test_resume.py resumes all rows.
LEFT_OUT = ("((", "clusters=")
RUNS = [row for row in {QUICK: None, **dict.fromkeys(BROAD)} if not any(word in row for word in LEFT_OUT)]


def interrupt(expression: str, directory: Path, seed: int) -> tuple[list[int], int]:
    """Kill a run several times. Return the steps it was taken up again from, and when all had a checkpoint.

    The kills come at any moment, but one of them not before all ranks have a checkpoint.
    """
    draw = random.Random(seed)
    firsts = []
    kills = 4 if expression == QUICK else 1 + (METHODS.index(expression) % 4 == 0)
    late = draw.randrange(kills)
    for kill in range(kills):
        often = SAVE_EVERY.get(expression) or draw.choice([1, 1, 2, 3])
        crew = Crew(processes(), 2, train, expression, directory, STEPS, often)
        victims = draw.choice([[0], [1], [0, 1], [1, 0]])
        kind, first = crew.hear(victims[0], lambda word: True)
        assert kind == "step", first
        firsts.append(first)
        if kill == late:
            for rank in range(2):
                crew.hear(rank, lambda word: word[0] == "saved")
        else:
            moment = first + draw.randint(0, 6)
            crew.hear(victims[0], lambda word, moment=moment: word[1] >= moment)
        time.sleep(draw.uniform(0.0, 0.006))
        crew.kill(victims)
        for rank, (kind, what) in enumerate(crew.last_words()):
            if kind == "error":
                assert rank not in victims, what
                assert what[0] == "PeerLost", what
    return firsts, late


@pytest.fixture(scope="module")
def spared() -> Iterator[Crew]:
    """Processes that nobody kills."""
    crew = Crew(processes(), 2, train_many, STEPS)
    yield crew
    crew.tell(None)
    assert crew.last_words() == [("result", None)] * 2


@pytest.mark.parametrize("expression", RUNS)
def test_a_killed_run_begun_again_is_the_same(spared: Crew, tmp_path: Path, expression: str) -> None:
    """Its last part runs where the run left alone did; the parts before it in new processes."""

    def trained() -> list[Any]:
        spared.tell((expression, tmp_path))
        words = [spared.hear(rank, lambda word: word[0] == "trained") for rank in range(2)]
        assert [kind for kind, _ in words] == ["trained"] * 2, words
        return [what for _, what in words]

    whole = trained()
    firsts, late = interrupt(expression, tmp_path, seed=METHODS.index(expression))
    resumed = trained()
    firsts.append(resumed[0][0])
    assert firsts == sorted(firsts)
    assert all(first > 0 for first in firsts[late + 1 :]), firsts
    for (start, expected), (first, trace) in zip(whole, resumed, strict=True):
        assert start == 0
        assert len(trace) == len(expected) - first
        for mine, theirs in zip(trace, expected[first:], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def lost(expression: str, where: str, victim: int) -> list[str]:
    """What the two others of three raise when the victim is killed while they wait for it."""
    crew = Crew(processes(), 3, stall, expression, where, victim, 4)
    assert crew.hear(victim, lambda word: word[0] == "here") == ("here", None)
    time.sleep(0.2)  # the others begin to wait
    crew.kill([victim])
    words = crew.last_words()
    assert words.pop(victim) == ("killed", None)
    assert [kind for kind, _ in words] == ["error"] * 2, words
    assert [what[0] for _, what in words] == ["PeerLost"] * 2, words
    return [what[1] for _, what in words]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("expression", "where", "place"),
    [
        ("ddp()", "backward", f"Round 3 (step 4): {REPORT}"),
        ("local_sgd(every=2)", "local", f"Round 1 (step 4): {REPORT}"),
        ("local_sgd(every=2, delay=1)", "local", REPORT),
        ("local_sgd(every=2, moments='average')", "local", f"Round 1 (step 4): {REPORT}"),
        ("local_sgd(every=3)", "averaged", REPORT),
        ("local_sgd(every=3, delay=2)", "finish", REPORT),
        ("local_sgd(every=8)", "finish", REPORT),
        (
            "hierarchical(nodes=((0, 1), (2,)), inner=1, outer=4)",
            "local",
            f"Round 0 (step 4): {REPORT}",
        ),
    ],
)
def test_a_killed_worker_is_noticed(expression: str, where: str, place: str, victim: int) -> None:
    for sentence in lost(expression, where, victim):
        assert sentence.startswith(place), sentence
        assert f" lost the connection to rank {victim} (" in sentence, sentence
        assert "\n" not in sentence


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_killed_while_tensors_are_on_their_way(victim: int) -> None:
    crew = Crew(processes(), 3, send_much, 4_000_000)
    crew.hear(victim, lambda word: word[1] >= 2)
    time.sleep(random.Random(victim).uniform(0, 0.05))
    crew.kill([victim])
    for rank, (kind, what) in enumerate(crew.last_words()):
        if rank != victim:
            assert (kind, what[0]) == ("error", "PeerLost")
            assert what[1].startswith("Round "), what
            assert f" lost the connection to rank {victim} (" in what[1], what


def stopped(function: Callable[..., None], victim: int, *args: Any) -> list[str]:
    """What the two others of three raise when the victim's process is stopped: alive, but silent."""
    crew = Crew(processes(), 3, function, *args)
    assert crew.hear(victim, lambda word: word[0] == "here") == ("here", None)
    pid = crew.processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    words = [crew.hear(rank, lambda word: False) for rank in range(3) if rank != victim]
    crew.kill([victim])
    crew.last_words()
    assert [(kind, what[0]) for kind, what in words] == [("error", "PeerLost")] * 2, words
    return [what[1] for _, what in words]


WAITING = "local_sgd(every=2)", "eager_sgd(every=2)", "gradient_code(stragglers=0)"


@pytest.mark.parametrize("expression", WAITING)
def test_a_timeout_holds_when_the_host_of_the_store_is_silent(expression: str) -> None:
    for sentence in stopped(halt, 0, expression, 0, 6.0):
        assert sentence.endswith(
            " timed out after 6 s, and the process group's store is silent: its host, usually rank 0, is "
            "stopped or cut off."
        )


@pytest.mark.parametrize("expression", WAITING)
def test_a_timeout_names_who_is_missing(expression: str) -> None:
    for sentence in stopped(halt, 2, expression, 2, 6.0):
        assert sentence.endswith(" timed out after 6 s: rank 2 is missing.")


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_timeout_while_connecting_names_who_is_missing(victim: int) -> None:
    reason = (
        ": rank 2 is missing."
        if victim
        else ", and the process group's store is silent: its host, usually rank 0, is stopped or cut off."
    )
    for sentence in stopped(stay_away, victim, victim, 6.0):
        assert sentence.startswith("Waiting for all ranks to connect: rank ")
        assert sentence.endswith(f" timed out after 6 s{reason}")


@pytest.mark.parametrize(
    ("way", "victim"), [("Torch", 2), ("Torch", 0), ("split", 2), ("duplicate", 1), ("sidecar", 2)]
)
def test_a_worker_killed_before_all_connected_is_noticed(way: str, victim: int) -> None:
    crew = Crew(processes(), 3, stay_away, victim, 300.0, way)
    assert crew.hear(victim, lambda word: word[0] == "here") == ("here", None)
    time.sleep(2)  # until the others have begun to connect
    crew.kill([victim])
    killed = time.monotonic()
    for rank in {0, 1, 2} - {victim}:
        kind, what = crew.hear(rank, lambda word: False)
        assert (kind, what[0]) == ("error", "PeerLost"), what
        assert what[1].startswith(
            f"Waiting for all ranks to connect: rank {rank} lost the connection to rank {victim} ("
        )
        assert "\n" not in what[1]
    assert time.monotonic() < killed + 10  # about 1 s, and more on a busy machine
    crew.last_words()


def fail_before_the_pairs_connect(comm: offbeat.Communicator) -> list[list[int]]:
    if comm.rank == 2:
        comm.worker.leave(Departure.of(ValueError("no data")))
        return []
    return comm.split([[0, 1], [2, 3]]).tell([comm.rank]).wait()


def test_who_connects_hears_of_those_who_have_left(pool: Pool) -> None:
    first, second, _, last = pool.attempt(fail_before_the_pairs_connect)
    assert [words[0] for words in first] == [words[0] for words in second] == [0, 1]
    assert str(last) == "Waiting for all ranks to connect: rank 2 failed (ValueError: no data)."


class Monitored:
    """What a wait asks: a store without notes, and connections. Those to `closed` ranks are closed."""

    names, name, timeout, patience, stopped = (0, 1), 1, 0.0, math.inf, threading.Event()

    def __init__(self, *closed: int) -> None:
        self.store_client, self.closed, self.probes = self, closed, 0

    def ask(self, call: Any, seconds: float) -> None:
        return None

    def find_closed(self) -> dict[int, RuntimeError]:
        self.probes += 1
        return {rank: RuntimeError("reset") for rank in self.closed}

    def explain_loss(self, what: str, error: Exception) -> Exception:
        return offbeat.PeerLost(f"{what}: {error}")


def test_a_wait_for_a_number_has_its_time_and_then_names_the_rank() -> None:
    monitor: Any = Monitored()
    NumberWait(monitor, 0, "a number", seconds=60).check()  # the timeout is over, but it has 60 s more
    wait = NumberWait(monitor, 0, "a number", seconds=0)
    with pytest.raises(
        offbeat.PeerLost, match=r" a number: rank 1 timed out after 0 s: rank 0 is missing\.$"
    ):
        wait.check()
    assert monitor.probes == 0


def test_a_wait_for_a_number_of_a_killed_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are closed, though the store, which it does not host, lives and has no note of it."""
    monkeypatch.setattr(monitor_module, "_PATIENT", 0.0)
    alive: Any = Monitored()
    NumberWait(alive, 0, "a number", seconds=60).check()
    assert alive.probes == 1
    lost: Any = Monitored(0)
    with pytest.raises(offbeat.PeerLost, match=r"^a number: reset$"):
        NumberWait(lost, 0, "a number", seconds=60).check()


class Mute:
    """A store whose host does not answer."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def clone(self) -> Mute:
        return self

    def check(self, keys: list[str]) -> bool:
        return self.free.wait()


def test_a_silent_store_holds_up_nobody() -> None:
    store: Any = Mute()
    store_client = StoreClient(store)
    first = store_client.post(lambda client: client.check(["a"]))
    with pytest.raises(Silent):
        store_client.ask(lambda client: client.check(["b"]), 0.01)
    assert not first.done()
    store.free.set()
    assert first.result(60)
    assert store_client.ask(lambda client: client.check(["c"]), 60)
    with pytest.raises(ZeroDivisionError):
        store_client.ask(lambda client: 1 / 0, 60)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from problems import Dyadic, data, optimizer_for
import offbeat

dist.init_process_group("gloo")
rank = dist.get_rank()
net = Dyadic()
opt = optimizer_for(net)
with offbeat.local_sgd(net, opt, every=3, delay=1) as sync:
    for step in range(4 if rank == 1 else 9):
        net(data(rank, step)).backward()
        sync.step()
        opt.zero_grad()
"""


@pytest.mark.slow
def test_a_script_that_fails_ends_at_once(tmp_path: Path) -> None:
    """With messages in flight that will never arrive, the interpreter must still be able to shut down."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", "--no-python"]
    command += [sys.executable, str(tmp_path / "script.py"), os.path.dirname(__file__)]
    done = warm.run(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1
    sentence = "Disagreement: Workers disagree: rank 0 is in round 1 at step 6, rank 1 in finish()"
    assert done.stderr.count(sentence) >= 1, done.stderr
    assert "terminate called" not in done.stderr
