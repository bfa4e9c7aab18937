"""How elastic runs end, and whose fault costs whom: joiners that differ, that come late, and last words."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from test_elastic import (  # noqa: F401
    A,
    Counting,
    Killed,
    Mortal,
    agree,
    build,
    check_same,
    jobs,
    seat,
    simulated_with,
    train,
)
from torch import nn
from torch._C._distributed_c10d import TCPStore

import offbeat
from offbeat.base.clock import Clock
from offbeat.comm.communicator import Communicator, Pending
from offbeat.elastic import wire
from offbeat.elastic.decision import decide, drop_finished
from offbeat.elastic.group import listens
from offbeat.elastic.lighthouse import load_torchft
from offbeat.elastic.scripted import Scripted
from offbeat.engine import healing
from offbeat.engine.commits import Rejoin
from offbeat.engine.headers import compare_members
from offbeat.engine.weights import DRY, NO_WEIGHT, ROUND, SHARE


@pytest.mark.parametrize("steps", [12, 10], ids=["round", "finish"])
def test_a_wrong_rate_is_the_fault_of_the_worker_that_came_later(steps: int) -> None:
    """After its first round, too, and in finish(): the others go on without it."""

    def worker(comm: Communicator) -> Any:
        group = Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1, 2]), A([0, 1])])
        model, sync = build("local_sgd", group, comm.rank)
        try:
            with sync:
                sync.start()
                train(model, sync, comm.rank, 9)
                if comm.rank == 2:
                    sync.optimizers[0].param_groups[0]["lr"] = 0.25
                train(model, sync, comm.rank, steps)
        except offbeat.Disagreement as error:
            return str(error)
        return [len(report.members) for report in sync.reports], [p.detach() for p in model.parameters()]

    one, other, late = offbeat.simulate(worker, 3)
    assert "rank 0 has learning rate 0.5, rank 2 0.25" in late
    assert "This worker leaves" in late
    assert one[0] == other[0] == [2, 3, 2][: steps // 4]
    check_same(one[1], other[1])


def rows(*rates: float) -> list[list[int]]:
    """The headers of a round after step 8, which differ in their learning rates."""
    words = [struct.unpack("<2q", struct.pack("<2d", lr, NO_WEIGHT)) for lr in rates]
    return [[ROUND, 0, 1, 8, lr, 0, rank, weight] for rank, (lr, weight) in enumerate(words)]


@pytest.mark.parametrize(
    ("rates", "entered", "odd"),
    [
        ([0.5, 0.25, 0.5], [0, 0, 0], [1]),  # the minority
        ([0.25, 0.5, 0.5], [0, 3, 3], [1, 2]),  # the one that is there the longest counts for more than two
        ([0.25, 0.5, 0.5], [0, 0, 3], [1, 2]),  # one against one: the first
        ([0.5, 0.5, 0.25], [2, 0, 0], [2]),
    ],
)
def test_who_is_right(rates: list[float], entered: list[int], odd: list[int]) -> None:
    for own in range(3):
        kind, text = (
            (offbeat.Disagreement, "This worker leaves")
            if own in odd
            else (offbeat.PeerLost, f"without rank {', '.join(map(str, odd))},")
        )
        with pytest.raises(kind, match=text):
            compare_members(rows(*rates), own, entered)
    compare_members(rows(0.5, 0.5), 0, [0, 4])


@pytest.mark.parametrize(
    ("weights", "entered", "odd"),
    [
        ([SHARE, NO_WEIGHT, 8.0], [0, 0, 0], [2]),
        ([SHARE, 8.0, NO_WEIGHT, 8.0], [0, 0, 0, 0], [2]),
        ([SHARE, NO_WEIGHT, 8.0], [0, 2, 2], [0, 1, 2]),  # the oldest cannot say
    ],
)
def test_a_worker_that_counts_for_nothing_does_not_decide(
    weights: list[float], entered: list[int], odd: list[int]
) -> None:
    """The first worker has run dry, and the others differ only in whether they count samples."""
    heads = rows(*[0.5] * len(weights))
    for head, weight in zip(heads, weights, strict=True):
        (head[7],) = struct.unpack("<q", struct.pack("<d", weight))
    heads[0][0] |= DRY
    for own in range(len(weights)):
        kind, text = (offbeat.PeerLost, f"without rank {odd[0]},")
        if own in odd:
            kind, text = offbeat.Disagreement, "Pass samples on every worker or on none"
        with pytest.raises(kind, match=text):
            compare_members(heads, own, entered)


def test_who_joins_before_the_first_commit_is_younger() -> None:
    """Also in the rounds after: its card says what the first decision said."""
    first = decide([seat("a"), seat("b", "x", 0, open=True)], "a").members
    assert (first.names, first.entered) == (("a", "b"), (1, 0))

    def worker(comm: Communicator) -> int:
        model, sync = build("local_sgd", Scripted(comm, [A([0, 1], [1]), A([0, 1])]), comm.rank)
        with sync:
            sync.start()
            train(model, sync, comm.rank, 4)
            assert sync._commits is not None
            return sync._commits._entered

    assert offbeat.simulate(worker, 2) == [0, 1]


def test_a_worker_that_cannot_read_the_state_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, instead of asking again; the others only lose it."""
    describe = wire.describe

    def elsewhere(value: Any, tensors: list[torch.Tensor]) -> Any:
        text = describe(value, tensors)
        return {"tensor": [*text["tensor"][:2], "cuda"]} if torch.is_tensor(value) else text

    monkeypatch.setattr(wire, "describe", elsewhere)

    def worker(comm: Communicator) -> Any:
        model, sync = build("local_sgd", Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1])]), comm.rank)
        try:
            with sync:
                sync.start()
                train(model, sync, comm.rank, 8)
        except wire.Unreadable as error:
            return str(error)
        return [len(report.members) for report in sync.reports]

    one, other, late = offbeat.simulate(worker, 3)
    assert "has a tensor on cuda, the model of this worker is on cpu" in late
    assert one == other == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_worker_that_comes_at_the_end_learns_that_the_run_is_finished(jobs: Any, early: bool) -> None:  # noqa: F811
    """It has the state, and waits for a round that never comes; or it asks while the others finish."""
    run = jobs("local_sgd", steps=22)
    run.start(0, 1, slow={17: 4.0 if early else 0.02, 21: 4.0})
    run.round(0, 3 if early else 4)
    run.start(2)
    error = run.until(lambda rank, kind, _: (rank, kind) == (2, "failed"), 60)
    assert error.startswith("RunFinished: The others have finished the run")
    ends = {rank: value for rank, kind, value in run.heard if kind == "end"}
    while ends.keys() != {0, 1}:
        run.until(lambda rank, kind, _: kind == "end")
        ends = {rank: value for rank, kind, value in run.heard if kind == "end"}
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [1, 2])
def test_a_worker_ends_by_itself_if_the_others_have_passed(jobs: Any, fault: int) -> None:  # noqa: F811
    """finish() has two common calls. Worker 1 loses a worker at the end of one that worker 0 has passed."""
    run = jobs("local_sgd", steps=22)
    run.start(0)
    run.start(1, fault=fault)
    ends: dict[int, Any] = {}
    while ends.keys() != {0, 1}:
        run.until(lambda rank, kind, _: kind == "end", 60)
        ends = {rank: value for rank, kind, value in run.heard if kind == "end"}
    assert ends[0] == ends[1]
    assert any((rank, text) == (1, "The test has lost a worker.") for rank, _, text in run.heard)


def test_a_finished_run_ends_those_with_its_method_only() -> None:
    over, both = seat("b", "x", 3, over=True), [seat("a", "x", 3), seat("b", "x", 3)]
    assert drop_finished(both, "a") == both
    new = seat("a", method="other")
    going = drop_finished([new, over], "a")
    assert decide(going, "a").members.names == ("a",)  # the finished run does not refuse its method
    with pytest.raises(offbeat.RunFinished, match="start a new run"):
        drop_finished([seat("a"), over], "a")


def test_those_who_have_passed_a_call_wait_for_the_others() -> None:
    seats = [seat("a", "x", 3, place=8.5), seat("b", "x", 3, place=8.0)]
    members = offbeat.elastic.decision.decide(seats, "b").members
    assert (members.names, members.partial) == (("b",), True)
    assert not offbeat.elastic.decision.decide([seat("a", "x", 3), seat("b", "x", 3)], "b").members.partial


def test_a_worker_that_was_left_behind_says_so_in_finish() -> None:
    def worker(comm: Communicator) -> None:
        _, sync = build("local_sgd", Scripted(comm, [A([0])]), 0)
        sync.start()

        def flush(clock: Clock) -> None:
            raise Rejoin(sync._commits, {})  # type: ignore[arg-type]

        sync.parts[0].flush = flush  # type: ignore[method-assign]
        sync.finish()

    with pytest.raises(offbeat.OffbeatError, match="gone on without this worker: start it again"):
        offbeat.simulate(worker, 1)


def test_a_checkpoint_repeats_a_round_in_the_air_that_has_lost_a_worker(tmp_path: Path) -> None:
    whole, counter = [A([0, 1, 2])] * 2, Counting()
    simulated_with(counter, "cocod", whole)

    def worker(comm: Communicator) -> Any:
        if comm.rank == 1:
            comm = Mortal(comm, [counter.second + 1])
        try:
            model, sync = build("cocod", Scripted(comm, [*whole, A([0, 2])]), comm.rank)
            with sync:
                sync.start()
                train(model, sync, comm.rank, 9)  # the second round begins after step 8, and lands after 10
                sync.save(tmp_path)
                train(model, sync, comm.rank, 22)
        except Killed:
            return None
        return [p.detach().clone() for p in model.parameters()], sync.parts[0].state_dict(), sync.reports

    _, _, reports = agree(offbeat.simulate(worker, 3))
    assert [report.repeats for report in reports] == [0, 1, 0, 0, 0]
    assert len(list(tmp_path.glob("offbeat-step-9-rank-*-of-2.pt"))) == 2


def test_stores_of_earlier_members_are_closed() -> None:
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    one, other = (f"127.0.0.1:{store.port}" for store in stores)
    group = offbeat.Elastic("http://127.0.0.1:1")
    threads = {thread.ident for thread in threading.enumerate()}
    group._reach(one).ask(lambda store: store.check(["any"]), 5)
    known = group._reach(other)
    known.ask(lambda store: store.check(["any"]), 5)
    assert list(group._stores) == [other]
    assert group._reach(other) is known
    mine = [t for t in threading.enumerate() if t.name == "offbeat-store" and t.ident not in threads]
    assert len(mine) == 1


def test_a_worker_that_is_dead_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert listens(address)
    assert not listens(address)
    with pytest.raises(offbeat.PeerLost, match="cannot be reached"):
        offbeat.Elastic("http://127.0.0.1:1")._reach(address)


def test_the_bytes_of_a_state_are_counted() -> None:
    def worker(comm: Communicator) -> Any:
        group = Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1, 2])])
        model, sync = build("diloco", group, comm.rank)
        with sync:
            sync.start()
            train(model, sync, comm.rank, 12)
        more = [report.bytes_received - report.bytes_sent for report in sync.reports]
        size = sum(p.nbytes for p in model.parameters())
        return more, sync.totals.bytes_received - sync.totals.bytes_sent, size

    (donor, given, size), (other, none, _), (late, got, _) = offbeat.simulate(worker, 3)
    assert got == -given > 3 * size  # weights, anchor, momentum
    assert (donor, other, late) == ([0, given, 0], [0, 0, 0], [got, 0])
    assert none == 0


def test_a_state_is_received_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that receives it has another current device than the caller."""
    made: list[torch.device] = []
    monkeypatch.setattr(wire.torch, "empty", lambda *_, device, **__: made.append(device) or torch.zeros(1))
    text = {"dict": [["a", {"tensor": ["float32", [1], "cuda"]}], ["b", {"tensor": ["float32", [1], "cpu"]}]]}
    wire.rebuild(text, [], 99, torch.device("cuda", 1))
    assert made == [torch.device("cuda", 1), torch.device("cpu")]


def test_a_model_on_two_axes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "find_mesh", lambda model: SimpleNamespace(ndim=2))
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="a mesh of 2 axes, but a worker that comes and goes can have one"):
        offbeat.local_sgd(
            model, torch.optim.SGD(model.parameters(), lr=0.1), group=offbeat.Elastic("http://127.0.0.1:1")
        )


@pytest.mark.parametrize("joining", [[], [2]])
def test_nobody_waits_for_the_drift_of_a_worker_that_is_lost(joining: list[int]) -> None:
    """A round has been applied, but the mean of its drift never comes: one who sends it may be dead.

    Those who give their state to a worker that joins do not wait for it either.
    """
    waits: list[int] = []

    def worker(comm: Communicator) -> list[tuple[int, bool]]:
        group = Scripted(comm, [A([0, 1]), A([0, 1, *joining], joining)])
        model, sync = build("cocod", group, comm.rank)
        seen: list[tuple[int, bool]] = []
        sync.on_report = lambda report: seen.append((report.round, report.drift is None))
        with sync:
            sync.start()
            if comm.rank in joining:
                train(model, sync, comm.rank, 10)
                return seen
            train(model, sync, comm.rank, 6)  # the first round has landed, and its drift is on the way
            never = Pending[Any](
                lambda: waits.append(comm.rank) or [torch.zeros(2)], lambda: False, lambda: 0.0
            )
            ledger = sync.parts[0].ledger  # type: ignore[attr-defined]
            *sent, _, began = ledger.open.pop()
            ledger.open.append((*sent, never, began))
            train(model, sync, comm.rank, 8)
            assert not ledger.open
            train(model, sync, comm.rank, 10)
        return seen

    assert offbeat.simulate(worker, 2 + len(joining))[:2] == [[(0, True), (1, False)]] * 2
    assert not waits


SEARCHING = """
import threading, time
from offbeat.elastic import lighthouse
lighthouse._PATIENCE = {patience}
client = lighthouse.Lighthouse("http://127.0.0.1:{port}", "worker")
threading.Thread(target=client.quorum, args=("store", {{}}), daemon=True).start()
time.sleep({after})
"""


@pytest.mark.parametrize("after", [0.1, 0.9, 1.3])
def test_a_process_ends_cleanly_while_it_looks_for_a_lighthouse(after: float) -> None:
    """A call that returns while Python ends would abort the process."""
    done = warm.run("-c", SEARCHING.format(patience=1.0, port=1, after=after))
    assert done.returncode == 0
    assert "FATAL" not in done.stderr


def test_a_process_ends_at_once_while_others_are_missing() -> None:
    server = load_torchft().LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    try:
        port = server.address().rpartition(":")[2]
        done = warm.run("-c", SEARCHING.format(patience=100.0, port=port, after=1.0), timeout=60)
    finally:
        server.shutdown()
    assert done.returncode == 0
