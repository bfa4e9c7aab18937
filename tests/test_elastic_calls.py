"""Calls that workers which come and go make together, what they cost, and who counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_elastic import A, Killed, build, check_same, seat, train
from torch import Tensor

import offbeat
from offbeat.comm.communicator import Communicator
from offbeat.elastic.scripted import Scripted
from offbeat.simulate import Network


def die_before_telling(sync: offbeat.Synchronizer, number: int) -> None:
    """Kill this worker when it would say for the `number`th time that a call is over."""
    tell, ends = sync._comm.tell, [0]

    def mortal(words: Any) -> Any:
        ends[0] += not words
        if ends[0] == number:
            raise Killed
        return tell(words)

    sync._comm.tell = mortal  # type: ignore[method-assign]


def weights(sync: offbeat.Synchronizer) -> list[Tensor]:
    return [p.detach().clone() for p in sync.model.parameters()]


@pytest.mark.parametrize("call", ["averaged", "finish"])
def test_a_mean_that_is_repeated_is_that_of_the_workers_that_are_left(call: str) -> None:
    """The mean with the lost worker has arrived, and is in the weights when the call is repeated."""

    def worker(comm: Communicator) -> Any:
        model, sync = build("local_sgd", Scripted(comm, [A([0, 1, 2]), A([0, 1])]), comm.rank)
        sync.start()
        train(model, sync, comm.rank, 6)
        before = weights(sync)
        try:
            if comm.rank == 2:
                die_before_telling(sync, 1 if call == "averaged" else 2)
            if call == "averaged":
                with sync.averaged():
                    seen = weights(sync)
                check_same(weights(sync), before)
            else:
                sync.finish()
                seen = weights(sync)
        except Killed:
            sync._leave(offbeat.PeerLost("The test has killed this worker."))
            return None
        return before, seen

    first, last, lost = offbeat.simulate(worker, 3)
    assert lost is None
    check_same(first[1], [(one + other) / 2 for one, other in zip(first[0], last[0], strict=True)])
    check_same(first[1], last[1])


@pytest.mark.parametrize("elastic", [True, False])
def test_seconds_of_a_checkpoint_are_counted_once(tmp_path: Path, elastic: bool) -> None:
    """A worker cannot have waited longer than the run has lasted: the start and a round in the air, too."""

    def worker(comm: Communicator) -> float:
        model, sync = build("cocod", Scripted(comm, [A([0, 1])]) if elastic else comm, comm.rank)
        sync.save(tmp_path)
        train(model, sync, comm.rank, 5)  # a round has begun after step 4, and lands after step 6
        sync.save(tmp_path)
        train(model, sync, comm.rank, 7)
        return comm.now() - sync.totals.seconds_waited

    assert min(offbeat.simulate(worker, 2, network=Network(latency=1.0))) >= 0


def test_a_worker_without_data_has_not_joined() -> None:
    def worker(comm: Communicator) -> list[int]:
        model, sync = build(
            "local_sgd", Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1, 2])]), comm.rank
        )
        with sync:
            sync.start()
            for _ in sync.batches(range(6 if comm.rank == 0 else 11)):
                train(model, sync, comm.rank, sync.steps + 1)
        return [report.joined for report in sync.reports]

    first, second, late = offbeat.simulate(worker, 3)
    assert first == second
    assert first[:2] == [0, 1]
    assert not any(first[2:])
    assert late == first[1:]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the worker has missed steps
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ],
    ids=["from its own rate", "from its step"],
)
def test_a_scheduler_makes_the_steps_that_a_worker_has_missed(make: Any) -> None:
    """As docs/elastic.md says. The rates of all members of a round are compared, to the bit."""

    def worker(comm: Communicator) -> list[float]:
        group = Scripted(comm, [A([0, 1]), A([0, 1, 2], [2]), A([0, 1, 2])])
        model, sync = build("local_sgd", group, comm.rank)
        scheduler = make(sync.optimizers[0])

        def follow(sync: offbeat.Synchronizer) -> None:
            while scheduler.last_epoch < sync.steps:
                scheduler.step()

        sync.on_join = follow
        with sync:
            sync.start()
            follow(sync)
            while sync.steps < 13:
                train(model, sync, comm.rank, sync.steps + 1)
                follow(sync)
        assert sync.reports[-1].workers == 3
        return [group["lr"] for group in sync.optimizers[0].param_groups]

    one, other, late = offbeat.simulate(worker, 3)
    assert one == other == late


def test_workers_of_another_run_do_not_count() -> None:
    group = offbeat.Elastic("http://127.0.0.1:1", least=2)
    own = seat(group.name, "x", 3)
    assert not group._enough([own, seat("b", method="other")])
    assert group._enough([own, seat("b", "x", 3)])


def test_a_worker_of_another_run_is_refused_before_there_are_enough() -> None:
    group = offbeat.Elastic("http://127.0.0.1:1", least=3)
    with pytest.raises(offbeat.Disagreement, match="another model"):
        group._enough([seat(group.name, method="other"), seat("b", "x", 3), seat("c", "x", 3)])


def test_a_stranger_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    group = offbeat.Elastic("http://127.0.0.1:1", token="secret")
    for name in ("a", "b", "a"):
        assert group._read(name, "host:1", {"told": {}, "proof": "wrong"}) is None
    assert [record.args for record in caplog.records] == [("a",), ("b",)]
