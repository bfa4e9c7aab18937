"""From any worker's saved state of a part, another worker may continue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Realistic, optimizer_for, take_step
from table import METHODS, enough, savable
from ticking import clocked

import offbeat
from offbeat.engine.agreement import copy_state
from offbeat.engine.exchange import Exchange
from offbeat.engine.transfer import share, why_unshared

STEPS = 8

# Why a method's state is of use only to the worker that saved it, by how the row begins.
REASONS = {
    "hierarchical": "its workers meet in groups",
    "noloco": "its workers meet in groups",
    "eager_diloco": "each worker has an anchor of its own",
    "overlap_local_sgd": "each worker has an anchor of its own",
    "ssd_sgd": "each worker holds a slice of the server's weights",
    "od_sgd": "each worker holds a slice of the server's weights",
    "wagma": "its rounds do not wait for all workers",
    "eager_sgd": "its rounds do not wait for all workers",
    "gradient_code": "its rounds do not wait for all workers",
    "coda": "each worker sums up its own weights over a stage",
}


def reason_of(row: str) -> str | None:
    timed = "its workers make different numbers of steps" if "Seconds(" in row else None
    return timed or REASONS.get(row.partition("(")[0])


SHARED = [row for row in METHODS if reason_of(row) is None]


def states_of(row: str) -> list[list[list[Any]]]:
    """By worker and step: the shared state of every part, and the parts' anchors."""

    def worker(comm: offbeat.Communicator) -> list[list[Any]]:
        torch.manual_seed(comm.rank)
        net = Realistic(comm.rank)
        opt = optimizer_for(net, "momentum")
        sync = offbeat.method(row)(net, opt, group=clocked(comm, row))
        steps = []
        for step in range(STEPS):
            take_step(net, opt, sync, comm.rank, step)
            if savable(row, step + 1):
                steps.append([copy_state(share(part, part.state_dict()).state) for part in sync.parts])
        return steps

    return offbeat.simulate(worker, 2)


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """The names of the entries in which two states differ."""
    if torch.is_tensor(one):
        return [] if torch.equal(one, other) else [name]
    if isinstance(one, dict):
        assert one.keys() == other.keys(), name
        return [d for key in one for d in differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, list):
        pairs = zip(one, other, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{name}.{i}")]
    return [] if one == other else [name]


@pytest.mark.few(18)
@pytest.mark.parametrize("row", SHARED)
def test_what_is_shared_is_equal_on_all_workers(row: str) -> None:
    """Whatever step it was saved after: a part kept by mistake would differ."""
    # The slow weights of a worker follow the consensus when the weights have become that.
    alone = "shard" if row.startswith("lookahead") else "none"
    for these, those in zip(*states_of(row), strict=True):
        found = differences(these, those)
        assert [name for name in found if alone not in name] == []


@pytest.mark.parametrize("row", METHODS)
def test_which_methods_cannot(row: str) -> None:
    def worker(comm: offbeat.Communicator) -> str | None:
        net = Realistic()
        return why_unshared(offbeat.method(row)(net, optimizer_for(net), group=comm).parts)

    assert set(offbeat.simulate(worker, enough(row))) == {reason_of(row)}


def shared_after(row: str, steps: int, **options: Any) -> tuple[Exchange, Any]:
    """Worker 1's exchange and its shared state, after so many steps of two workers."""

    def worker(comm: offbeat.Communicator) -> Any:
        net = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            net.weight.zero_()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.method(row)(net, opt, group=comm)
        for _ in range(steps):
            net.weight.grad = torch.full((1, 2), -1.0 - 2 * comm.rank)  # worker 0 moves by 1, worker 1 by 3
            sync.observe(1.0)
            sync.step(**options)
        part = sync.parts[-1]
        return part, part.state_dict(), share(part, part.state_dict())

    return offbeat.simulate(worker, 2)[1]


def test_the_mean_in_flight_counts_as_sent() -> None:
    """A worker that has the consensus is not shifted when the round lands."""
    _, before, after = shared_after("cocod(every=3, delay=2)", 3)
    assert before["states"]["update"]["sent"][0].tolist() == [9.0, 9.0]
    assert after.state["states"]["update"]["sent"][0].tolist() == [6.0, 6.0]
    assert after.state["air"]["mean"][0].tolist() == [6.0, 6.0]
    assert after.state["air"]["bytes"] == [0, 0]
    assert before["air"]["bytes"] != [0, 0]


def test_what_is_dropped_is_named() -> None:
    code = "reduce=ErrorFeedback(TopK(2, least=1))"
    _, before, after = shared_after(f"diloco(every=3, {code})", 4)
    assert before["states"]["reduce"]["residual"] is not None
    assert after.state["states"]["reduce"]["residual"] is None
    assert after.dropped == {"what codes have not sent yet"}
    assert differences(before["states"]["update"], after.state["states"]["update"]) == []
    _, before, after = shared_after("adacomm(start=3, interval=3)", 4, samples=5)
    assert before["tally"]["samples"] == 5
    assert before["ledger"]["losses"] == 1
    assert after.state["tally"]["samples"] == -1
    assert after.state["ledger"]["losses"] == 0
    assert after.state["ledger"]["last"] == before["ledger"]["last"]
    assert after.dropped == {"samples since the last round", "losses since the last round"}


def test_nothing_else_is_dropped() -> None:
    _, before, after = shared_after("diloco(every=3)", 4)
    assert after.dropped == frozenset()
    assert differences(before, after.state) == []
