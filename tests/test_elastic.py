"""Workers come and go: rounds commit on all members or on none, and who joins is healed."""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import runpy
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import processes
from torch import nn

import offbeat
from offbeat.comm.changing import Card
from offbeat.comm.collective import Collective
from offbeat.comm.communicator import Communicator, PendingList, Tensors, Wrapped
from offbeat.elastic.decision import Seat, decide
from offbeat.elastic.lighthouse import load_torchft
from offbeat.elastic.scripted import Attempt, Scripted
from offbeat.elastic.wire import describe, rebuild
from offbeat.engine.commits import count_landed

A = Attempt
Heard = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks/elastic/heard.py"))["Heard"]
EVERY = 4
METHODS: dict[str, Callable[..., Any]] = {
    "local_sgd": functools.partial(offbeat.local_sgd, every=EVERY),
    "flat": functools.partial(offbeat.local_sgd, every=EVERY, drift=False),
    "post_local_sgd": functools.partial(offbeat.post_local_sgd, switch=2, every=EVERY),
    "qsr": functools.partial(offbeat.qsr, alpha=0.5, base=EVERY),
    "slowmo": functools.partial(offbeat.slowmo, every=EVERY, momentum=0.5, ramp=0),
    "diloco": functools.partial(offbeat.diloco, every=EVERY, lr=0.5, momentum=0.5, ramp=0),
    "palsgd": functools.partial(offbeat.palsgd, every=EVERY, p=0.25, eta=0.5),
    "streaming": functools.partial(offbeat.streaming_diloco, every=EVERY, fragments=2, delay=1, reduce=None),
    "cocod": functools.partial(offbeat.cocod, every=EVERY, delay=2),
    "late": functools.partial(offbeat.cocod, every=EVERY, delay="round"),
    "dasgd": functools.partial(offbeat.dasgd, every=EVERY, delay=2),
    "feedback": functools.partial(
        offbeat.diloco, every=EVERY, reduce=offbeat.ErrorFeedback(offbeat.TopK(2, least=1))
    ),
    "stages": functools.partial(
        offbeat.cocod, every=EVERY, delay=2, reduce=offbeat.ErrorFeedback(offbeat.Quantized(8, least=1))
    ),
}
BLOCKING = ["local_sgd", "flat", "post_local_sgd", "qsr", "slowmo", "diloco", "feedback"]


class Killed(BaseException):
    """A simulated worker is killed."""


class Mortal(Wrapped):
    """A communicator that ends its worker when it would send one message more than `messages`."""

    def __init__(self, comm: Communicator, messages: list[float]) -> None:
        super().__init__(comm)
        self.messages = messages

    def wrap(self, comm: Communicator) -> Communicator:
        return Mortal(comm, self.messages)

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        self.messages[0] -= 1
        if self.messages[0] < 0:
            raise Killed
        return super().run(kind, tensors, src=src, control=control)


def build(name: str, group: Any, rank: int) -> tuple[nn.Module, offbeat.Synchronizer]:
    torch.manual_seed(rank)  # the start must make them equal
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-8, 8, parameter.shape) * 12 / 2**6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, METHODS[name](model, optimizer, group=group)


def train(model: nn.Module, sync: offbeat.Synchronizer, rank: int, steps: int) -> None:
    """Gradients that differ between workers and steps, as multiples of 12 / 2¹⁰: sums of three are exact."""
    while sync.steps < steps:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, (rank + 1) * (sync.steps % 3 + i + 1) * 12 / 2**10)
        sync.step()


def simulated(name: str, script: list[Attempt], workers: int, steps: int, **killed: Any) -> list[Any]:
    """Weights, states and rounds of every worker; None for one that is gone."""

    def worker(comm: Communicator) -> Any:
        if comm.rank == killed.get("rank"):
            comm = Mortal(comm, [killed["messages"]])
        try:
            model, sync = build(name, Scripted(comm, script), comm.rank)
            with sync:
                sync.start()
                train(model, sync, comm.rank, steps)
        except (Killed, offbeat.PeerLost):
            return None
        rounds = [(r.step, r.round, [int(n) for n in r.members], r.joined, r.repeats) for r in sync.reports]
        last = [part for part in sync.parts if isinstance(part, offbeat.Exchange)][-1]
        return [p.detach().clone() for p in model.parameters()], last.state_dict(), rounds

    return offbeat.simulate(worker, workers)


def same(these: Any, those: Any) -> bool:
    if torch.is_tensor(these):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(same(these[key], those[key]) for key in these)
    if isinstance(these, list | tuple):
        return len(these) == len(those) and all(map(same, these, those))
    return bool(these == those)


def check_same(these: Any, those: Any) -> None:
    if not same(these, those):
        raise AssertionError("they differ")  # pytest would print all of both


def agree(answers: list[Any]) -> Any:
    """The rounds of the workers that are left, whose weights and anchors must be equal to the bit."""
    left = [answer for answer in answers if answer is not None]
    for answer in left:
        check_same(answer[0], left[0][0])
        shared = [
            {k: v for k, v in a[1]["states"]["update"].items() if k != "sent"} for a in (answer, left[0])
        ]
        check_same(*shared)
    return left[0]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", METHODS)
def test_the_others_go_on_without_a_worker(name: str) -> None:
    first = 4 if name == "post_local_sgd" else 2
    answers = simulated(name, [*[A([0, 1, 2])] * first, A([0, 2])], 3, 22)
    assert answers[1] is None
    _, _, rounds = agree(answers)
    counts = [len(members) for _, _, members, _, _ in rounds]
    assert 3 in counts or name == "post_local_sgd"
    assert counts[-1] == 2
    assert not any(repeats for *_, repeats in rounds)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("more", [1, 3])
def test_a_round_that_loses_a_worker_is_repeated(name: str, more: int) -> None:
    """Killed in the middle of a round, at each of its messages. The blocking ones lose nothing of it."""
    whole = [A([0, 1, 2])] * 2
    counter = Counting()
    simulated_with(counter, name, whole)
    answers = simulated(name, [*whole, A([0, 2])], 3, 22, rank=1, messages=counter.second + more)
    assert answers[1] is None
    weights, _, rounds = agree(answers)
    repeated = [members for *_, members, _, repeats in rounds if repeats]
    if name in BLOCKING and repeated:
        assert repeated == [[0, 2]]
        reference = agree(simulated(name, [A([0, 1, 2]), A([0, 2])], 3, 22))
        check_same(weights, reference[0])


def test_a_worker_that_is_lost_after_the_script_ends_the_run() -> None:
    """The script has no attempt without it, so the others cannot repeat the round."""
    answers = simulated("local_sgd", [A([0, 1, 2])] * 2, 3, 22, rank=1, messages=30)
    assert answers == [None] * 3


class Counting:
    """How many messages a worker sends before its second round."""

    second = 0


def simulated_with(counter: Counting, name: str, script: list[Attempt]) -> None:
    """Count the messages of worker 1 until its second attempt begins."""

    def worker(comm: Communicator) -> None:
        left = [1e9]
        group = Scripted(Mortal(comm, left) if comm.rank == 1 else comm, script)
        model, sync = build(name, group, comm.rank)
        gather, seen = group._list, [0]

        def listed(card: Card) -> list[Seat]:
            seen[0] += 1
            found = gather(card)
            if seen[0] == 3 and comm.rank == 1:
                counter.second = int(1e9 - left[0])
            return found

        group._list = listed  # type: ignore[method-assign]
        with sync:
            train(model, sync, comm.rank, 3 * EVERY)

    offbeat.simulate(worker, 3)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", METHODS)
def test_who_joins_is_healed_and_counts_from_its_second_round(name: str) -> None:
    if name == "post_local_sgd":
        script = [*[A([0, 1])] * 3, A([0, 1, 2, 3], [2, 3]), A([0, 1, 2, 3])]
    else:
        script = [A([0, 1]), A([0, 1, 2, 3], [2, 3]), A([0, 1, 2, 3])]
    _, _, rounds = agree(simulated(name, script, 4, 22))
    joined = [(members, joined) for _, _, members, joined, _ in rounds if joined]
    assert joined[0] == ([0, 1, 2, 3], 2)
    # Two of four with weight 0: the mean is that of the two others, to the bit.
    if name in BLOCKING and name != "feedback":
        steps = next(step for step, _, _, joined, _ in rounds if joined)
        with_them, without = (
            agree(simulated(name, of, n, steps)) for of, n in ((script, 4), (script[:1], 2))
        )
        check_same(with_them[0], without[0])
        check_same(with_them[1]["states"], without[1]["states"])


def test_a_healed_worker_asks_where_it_is() -> None:
    """The callback may set a scheduler: the coming step is that of the round in which the worker joins."""
    heard: list[int] = []

    def worker(comm: Communicator) -> int:
        group = Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1, 2])])
        model, sync = build("diloco", group, comm.rank)
        sync.on_join = lambda run: heard.append(run.steps)
        with sync:
            train(model, sync, comm.rank, 12)  # the first step joins, and drops its gradient
        return sync.totals.rounds

    assert offbeat.simulate(worker, 3) == [3, 3, 2]
    assert heard == [2 * EVERY - 1]


def test_a_worker_that_joins_must_find_its_learning_rate() -> None:
    def worker(comm: Communicator) -> Any:
        group = Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1])])
        model, sync = build("local_sgd", group, comm.rank)
        if comm.rank == 2:
            sync.on_join = lambda run: run.optimizers[0].param_groups[0].update(lr=0.25)
        try:
            with sync:
                sync.start()
                train(model, sync, comm.rank, 12)
        except offbeat.Disagreement as error:
            return str(error)
        return [len(report.members) for report in sync.reports]

    answers = offbeat.simulate(worker, 3)
    assert "learning rate" in answers[2]
    assert answers[:2] == [[2, 2, 2]] * 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (functools.partial(offbeat.ddp), "receive the optimizers"),
        (functools.partial(offbeat.eager_diloco), "anchor of its own"),
        (functools.partial(offbeat.noloco), "in groups"),
        (functools.partial(offbeat.hierarchical, nodes=2), "the same workers all the time"),
        (functools.partial(offbeat.a2sgd, every=8), "belongs to one worker"),
        (functools.partial(offbeat.def_sgd), "belongs to one worker"),
        (functools.partial(offbeat.adaptive, sample=10), "measurements of all workers"),
        (functools.partial(offbeat.wagma), "do not wait for all workers|in groups"),
        (
            functools.partial(offbeat.streaming_diloco, every=4, fragments=2, delay=2),
            "land before the next one",
        ),
    ],
)
def test_methods_that_need_every_worker_refuse(make: Any, why: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=why):
        make(model, optimizer, group=offbeat.Elastic("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    "options", [{"lighthouse": "host:1"}, {"least": 0}, {"timeout": 0}, {"token": ""}, {"token": 3}]
)
def test_bad_options_are_refused(options: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="Elastic"):
        offbeat.Elastic(**{"lighthouse": "http://127.0.0.1:1", **options})


def seat(name: str, lineage: str = "", rounds: int = -1, **more: Any) -> Seat:
    key, attempt, size = more.pop("key", ""), more.pop("attempt", 0), more.pop("size", 1)
    card = Card(more.pop("method", "m"), "local_sgd()", lineage, rounds, **more)
    return Seat(name, card, f"{name}:1", attempt, key, size)


def test_members_are_those_with_the_most_rounds() -> None:
    seats = [
        seat("a", "x", 3, open=True),
        seat("b", "y", 2, open=True),
        seat("c", "x", 3, open=True),
        seat("d"),
    ]
    found = decide(seats, "a")
    assert found.members.names == ("a", "b", "c", "d")
    assert found.donors == {"b": "a", "d": "c"}  # spread over those that have the state
    assert decide([*seats[:3], seat("c2", "x", 3)], "a").members.names == (
        "a",
        "c",
        "c2",
    )  # it cannot heal now
    assert decide(seats[3:], "d").members.starts


def test_a_round_in_doubt_is_committed_if_anyone_has() -> None:
    doubt = [seat("a", "x", 3, prepared="xy"), seat("b", "x", 3, prepared="xy")]
    assert decide(doubt, "a").members.lineage == "x"
    assert decide([*doubt, seat("c", "xy", 4)], "a").members.lineage == "xy"
    assert decide([*doubt, seat("c", "xy", 4)], "a").members.names == ("a", "b", "c")


def test_connections_are_kept_as_long_as_the_members_stay() -> None:
    both = [seat("a", "x", 3, key="k", size=2), seat("b", "x", 3, key="k", size=2)]
    assert decide(both, "a").keeps
    assert not decide([both[0], seat("b", "x", 3)], "a").keeps
    one, two = ([seat("a", "x", 3, attempt=n), seat("b", "x", 3)] for n in (1, 2))
    assert decide(one, "a").members.key != decide(two, "a").members.key


def test_connections_to_a_worker_that_is_left_out_are_not_kept() -> None:
    """The lighthouse leaves out a worker whose sign of life is late: the others would wait for it."""
    three = [seat(name, "x", 3, key="k", size=3) for name in "abc"]
    assert decide(three, "a").keeps
    assert not decide(three[:2], "a").keeps
    assert decide(three[:2], "a").members.key == decide(three[:2], "b").members.key != "k"


def test_another_method_is_refused_by_the_one_that_has_it() -> None:
    seats = [seat("a", method="other"), seat("b", "x", 3), seat("c", "x", 3)]
    assert decide(seats, "b").members.names == ("b", "c")
    with pytest.raises(offbeat.Disagreement, match="another model"):
        decide(seats, "a")


def test_at_the_start_most_workers_decide_about_the_method() -> None:
    seats = [seat("a", method="other"), seat("b"), seat("c")]
    assert decide(seats, "b").members.names == ("b", "c")
    with pytest.raises(offbeat.Disagreement, match="another model"):
        decide(seats, "a")


def test_workers_with_another_token_are_named_once_and_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = offbeat.Elastic(lighthouse="http://127.0.0.1:1", token="secret")
    strangers = [f"stranger {n}" for n in range(300)]
    for name in strangers + strangers:
        assert group._read(name, "127.0.0.1:2", {"told": {}, "proof": "none"}) is None
    assert [record.args[0] for record in caplog.records] == strangers[:100]
    assert len(group._strangers) == 100


def test_rounds_of_several_exchanges_must_not_overlap() -> None:
    def worker(comm: Communicator) -> None:
        net, group = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Scripted(comm, [Attempt([0])])
        halves = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
        parts = [
            offbeat.Exchange(offbeat.params(net, only=half), when=when, among=group, delay=4)
            for half, when in zip(halves, (offbeat.Every(16), offbeat.Every(24, offset=8)), strict=True)
        ]
        offbeat.Synchronizer(torch.optim.SGD(net.parameters(), lr=0.1), parts)

    with pytest.raises(ValueError, match="give all of them the same period, or no delay"):
        offbeat.simulate(worker, 1)


@pytest.mark.parametrize(
    ("expression", "landed"),
    [
        ("local_sgd(every=2)", 3),
        ("cocod(every=3, delay=2)", 1),
        ("post_local_sgd(switch=2, every=2)", 4),
    ],
)
def test_a_checkpoint_counts_the_rounds_that_it_has_applied(expression: str, landed: int) -> None:
    """Not its steps: a worker that loads an old one would seem to be ahead of a run that goes on."""
    net = nn.Linear(2, 2)
    sync = offbeat.method(expression)(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(7):
        net(torch.ones(1, 2)).sum().backward()
        sync.step()
    assert count_landed(sync) == landed


def test_what_arrives_is_checked() -> None:
    """Complex tensors and numbers of NumPy travel; other devices and more bytes than announced do not."""
    state = {"angles": torch.ones(3, dtype=torch.complex64), "lr": np.float64(0.5)}
    tensors, again = list[torch.Tensor](), list[torch.Tensor]()
    text = json.loads(json.dumps(describe(state, tensors)))
    assert rebuild(text, again, 24) == {"angles": again[0], "lr": 0.5}
    with pytest.raises(ValueError, match="3"):
        rebuild(text, [], 23)
    for device in ("meta", "cuda", "nowhere"):
        with pytest.raises(ValueError, match=device):
            rebuild({"tensor": ["float32", [1], device]}, [], 99)


def test_a_state_travels_as_tensors_and_json() -> None:
    state = {"a": [1, 2.5, None, True, "x"], 3: (torch.tensor([True, False]), {"b": torch.zeros(2, 0)})}
    tensors: list[torch.Tensor] = []
    text = describe(state, tensors)
    again: list[torch.Tensor] = []
    copy = rebuild(text, again, 2**20)
    for one, other in zip(again, tensors, strict=True):
        one.copy_(other)
    assert same(state, copy)
    with pytest.raises(TypeError, match="cannot be sent"):
        describe({"a": object()}, [])


class Jobs:
    """A lighthouse in this process, and workers that are processes of their own."""

    def __init__(
        self, name: str, *, steps: int = 10**6, pause: float = 0.02, port: str | None = None
    ) -> None:
        self.light(port)
        self.name, self.steps, self.pause = name, steps, pause
        self.said, self.all = Heard(processes()), dict[int, Any]()
        self.heard: list[tuple[int, str, Any]] = []

    def light(self, port: str | None = None) -> None:
        server = load_torchft().LighthouseServer
        bind = f"[::]:{port or 0}"
        self.lighthouse = server(bind=bind, min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=1500)
        self.port = self.lighthouse.address().rsplit(":", 1)[1]

    def start(self, *ranks: int, **options: Any) -> None:
        url = f"http://127.0.0.1:{self.port}"
        for rank in ranks:
            args = (url, rank, options.pop("name", self.name), self.steps, self.pause, options)
            self.all[rank] = self.said.start(work, *args)

    def until(self, enough: Callable[[int, str, Any], bool], seconds: float = 120) -> Any:
        """Wait for a message, and return it."""
        deadline = time.perf_counter() + seconds
        while True:
            try:
                self.heard.append(self.said.get(timeout=max(0.1, deadline - time.perf_counter())))
            except queue.Empty:
                raise AssertionError(f"nothing came after {self.heard[-5:]}") from None
            assert self.heard[-1][1] != "failed" or enough(*self.heard[-1]), self.heard[-1]
            if enough(*self.heard[-1]):
                return self.heard[-1][2]

    def round(self, of: int, least: int = 0, workers: int | None = None) -> Any:
        return self.until(
            lambda rank, kind, report: (
                (rank, kind) == (of, "round")
                and report.round >= least
                and workers in (None, report.workers - report.joined)
            )
        )

    def end(self) -> None:
        for process in self.all.values():
            process.kill()
            process.join()
        self.lighthouse.shutdown()


def work(
    url: str, rank: int, name: str, steps: int, pause: float, options: dict[str, Any], said: Any
) -> None:
    torch.set_num_threads(1)
    slow, fault, stop = options.pop("slow", {}), options.pop("fault", 0), options.pop("stop", -1)
    log = logging.Handler(logging.WARNING)
    log.emit = lambda record: said.send((rank, "log", record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(log)
    try:
        group = offbeat.Elastic(url, name=f"{rank:04}", timeout=20, **options)
        model, sync = build(name, group, rank)

        def tell(report: offbeat.Report) -> None:
            said.send((rank, "round", report))
            if report.round == stop:
                os.kill(os.getpid(), signal.SIGSTOP)

        sync.on_report = tell
        with sync:
            sync.start()
            said.send((rank, "started", sync.steps))
            while sync.steps < steps:
                time.sleep(slow.get(sync.steps, pause))
                train(model, sync, rank, sync.steps + 1)
            if fault:
                lose_after_telling(sync, fault)
        said.send((rank, "end", [p.detach().tolist() for p in model.parameters()]))
    except BaseException as error:
        said.send((rank, "failed", f"{type(error).__name__}: {error}"))
        raise


def lose_after_telling(sync: offbeat.Synchronizer, number: int) -> None:
    """Lose a worker just after the others have passed the end of a call, counted from now."""
    tell, ends = sync._comm.tell, [0]

    def faulty(words: Any) -> Any:
        message = tell(words)
        ends[0] += not words
        if not words and ends[0] == number:
            message.wait()
            raise offbeat.PeerLost("The test has lost a worker.")
        return message

    sync._comm.tell = faulty  # type: ignore[method-assign]


def die_in_a_sentence(said: Any) -> None:
    os.write(said.fileno(), b"\0")
    os.kill(os.getpid(), signal.SIGKILL)


def say_something(said: Any) -> None:
    said.send("something")


def test_the_others_are_heard_if_one_is_killed_while_it_speaks() -> None:
    """Otherwise storms and tests that kill workers would take them for hanging."""
    said = Heard(processes())
    said.start(die_in_a_sentence).join()
    said.start(say_something)
    assert said.get(60) == "something"
    with pytest.raises(queue.Empty):
        said.get()


@pytest.fixture
def jobs() -> Any:
    made: list[Jobs] = []

    def make(*args: Any, **options: Any) -> Jobs:
        made.append(Jobs(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["slowmo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("local_sgd", "diloco", "cocod"))],
)
def test_a_run_with_losses_is_the_simulation_with_the_same_members(jobs: Any, name: str) -> None:
    """kill -9 at some moment, and a new worker: to the bit what a simulation of the same members gives."""
    run = jobs(name, steps=100)
    run.start(0, 1, 2, 3)
    run.round(0, 2, workers=4)
    time.sleep(0.03)
    run.all[2].kill()
    run.all[3].kill()
    run.round(0, 3, workers=2)
    run.start(4, 5)
    ends: dict[int, Any] = {}
    while ends.keys() != {0, 1, 4, 5}:
        run.until(lambda rank, kind, _: kind == "end")
        ends = {rank: value for rank, kind, value in run.heard if kind == "end"}
    assert ends[0] == ends[1] == ends[4] == ends[5]
    told = [[report for rank, kind, report in run.heard if (rank, kind) == (one, "round")] for one in (0, 1)]
    reports = max(told, key=len)  # one of them may have come later
    script, seen = list[Attempt](), {rank for rank, kind, at in run.heard if kind == "started" and at == 0}
    for report in reports:
        members = [int(member.split(":")[0]) for member in report.members]
        script.append(A(members, sorted(set(members) - seen)))
        seen |= set(members)
    assert seen == {0, 1, 2, 3, 4, 5}
    if name != "cocod":  # a round in the air is repeated where it lands
        assert [p.tolist() for p in agree(simulated(name, script, 6, 100))[0]] == ends[0]


@pytest.mark.slow
def test_nobody_waits_for_a_worker_that_the_lighthouse_has_left_out(jobs: Any) -> None:
    """It lives, and its connections are open, but it has been silent for too long when the others ask."""
    run = jobs("flat")  # which reports a round before it asks for the members of the next one
    run.start(0, 1)
    run.start(2, stop=6)
    assert len(run.round(2, 6).members) == 3
    without = run.round(0, 7)
    assert [int(name.split(":")[0]) for name in without.members] == [0, 1]
    assert without.repeats == 0
    os.kill(run.all[2].pid, signal.SIGCONT)
    run.round(2, 8, workers=3)


@pytest.mark.slow
def test_strangers_and_garbage_do_no_harm(jobs: Any) -> None:
    run = jobs("local_sgd")
    run.start(0, 1, token="secret")
    run.round(0, 2, workers=2)
    run.start(5, name="diloco", token="secret")
    error = run.until(lambda rank, kind, _: (rank, kind) == (5, "failed"))
    assert "Disagreement: This worker has the method diloco(" in error
    run.start(6, token="wrong")
    time.sleep(3)
    own = [ports(run.all[rank].pid) for rank in (0, 1)]
    assert all(len(found) >= 2 for found in own)  # a store and gloo
    for port in (*own[0], *own[1], int(run.port)):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
            link.sendall(os.urandom(2**12))
    last = max(report.round for rank, kind, report in run.heard if kind == "round")
    assert run.round(0, last + 30).workers == 2
    assert not any(rank == 6 and kind == "started" for rank, kind, _ in run.heard)


def ports(pid: int) -> list[int]:
    """The ports on which a process listens."""
    inodes = set()
    for link in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{link}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            for line in file.read().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    found.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(found)


@pytest.mark.slow
def test_too_few_workers_wait_and_a_lighthouse_may_start_again(jobs: Any) -> None:
    run = jobs("diloco")
    run.start(0, 1)
    run.round(0, 2, workers=2)
    port = run.port
    run.lighthouse.shutdown()
    del run.lighthouse
    time.sleep(1)
    run.light(port)
    last = max(report.round for _, kind, report in run.heard if kind == "round")
    last = run.round(0, last + 30).round
    before = len(run.heard)
    run.all[1].kill()
    time.sleep(4)
    with suppress(queue.Empty):
        while True:
            run.heard.append(run.said.get())
    alone = [report for _, kind, report in run.heard if kind == "round" and report.workers == 1]
    assert not alone
    said = [text for rank, kind, text in run.heard[before:] if (rank, kind) == (0, "log")]
    assert [text for text in said if "at least 2 workers" in text] == [
        "1 of at least 2 workers are here: waiting for more."
    ]
    assert any("does not answer" in str(text) for _, kind, text in run.heard[:before] if kind == "log")
    run.start(2)
    assert run.round(2, last + 1, workers=2).workers == 2
