"""Workers that do not do the same: one sentence on every rank, naming the odd one, and nobody hangs.

The sentence does not depend on the method, nor on what carries the messages. So every method is tried in
simulation, and on gloo those few whose workers wait for each other in different ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, Small, data, optimizer_for, take_step
from table import EACH, ROWS, enough
from ticking import clocked
from torch import nn

import offbeat

# One that meets everyone in every round, and one that meets parts of them.
REAL = ["local_sgd(every=3, delay=2)", "hierarchical(nodes=2, inner=1, outer=4)"]
# A rank that stopped early is waited for behind a half-sent message, by a sidecar, and while connecting.
ASIDE = [
    "streaming_diloco(every=4, fragments=2, delay=2, reduce=ErrorFeedback(Quantized(4, block=8, least=1)))",
    "eager_sgd(every=4, grace=60.0)",
    "noloco(every=2, lr=0.5, momentum=0.5, ramp=0)",
    "wagma(group_size=2, every=4, grace=60.0)",
    "local_sgd(every=4, delay=2, reduce=Quantized(8, block=8, least=1))",
]
BATCHES = "Do all workers have the same number of batches?"


def attempt(function: Callable[..., Any], *args: Any, workers: int = 4) -> list[Any]:
    """What each simulated worker returns, with errors as values."""
    answers: list[Any] = [None] * workers

    def run(comm: offbeat.Communicator) -> None:
        try:
            answers[comm.rank] = function(comm, *args)
        except Exception as error:
            answers[comm.rank] = error

    with suppress(offbeat.Disagreement):  # when nobody could move
        offbeat.simulate(run, workers)
    return answers


def said(answers: list[Any]) -> str:
    """The sentence of every rank, which is the same."""
    assert [type(answer) for answer in answers] == [offbeat.Disagreement] * len(answers), answers
    sentences = {str(answer) for answer in answers}
    assert len(sentences) == 1, sentences
    return sentences.pop()


def go(comm: offbeat.Communicator, expression: str, steps: int, lr: float = 0.25) -> None:
    net = Small()
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    with offbeat.method(expression)(net, opt, group=clocked(comm, expression)) as sync:
        for step in range(steps):
            take_step(net, opt, sync, comm.rank, step)


def stop_early(comm: offbeat.Communicator, expression: str, guilty: int, steps: int) -> None:
    go(comm, expression, steps if comm.rank == guilty else 12)


def names_who_stopped(sentence: str, guilty: int, steps: int | None) -> None:
    """`steps` is None where a method counts more steps than there are batches."""
    finished = f"in finish() at step {'' if steps is None else steps}"
    assert f"rank {guilty} {finished}" in sentence or f"rank {guilty} is {finished}" in sentence
    assert sentence.startswith("Workers disagree: rank ")
    assert sentence.endswith(BATCHES)


@pytest.mark.parametrize(("guilty", "steps"), [(0, 0), (3, 3), (0, 4), (3, 4), (0, 7)])
@pytest.mark.parametrize("expression", REAL)
def test_a_rank_with_fewer_batches(pool: Pool, expression: str, guilty: int, steps: int) -> None:
    names_who_stopped(said(pool.attempt(stop_early, expression, guilty, steps)), guilty, steps)


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [7, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("expression", ASIDE)
def test_a_rank_with_fewer_batches_that_is_waited_for_elsewhere(
    pool: Pool, expression: str, steps: int
) -> None:
    names_who_stopped(said(pool.attempt(stop_early, expression, 0, steps)), 0, steps)


@pytest.mark.few(6)
@pytest.mark.parametrize("expression", [row for row in ROWS if "Seconds(" not in row.values[0]])
def test_a_rank_with_fewer_batches_in_every_method(expression: str) -> None:
    sentence = said(attempt(stop_early, expression, 3, 7))
    names_who_stopped(sentence, 3, None if expression.startswith("palsgd") else 7)


@pytest.mark.slow
@pytest.mark.parametrize(("last", "steps"), [(False, 0), (True, 11), (False, 11), (False, 10), (False, 7)])
@pytest.mark.parametrize("expression", [row for row in EACH if "Seconds(" not in row])
def test_a_rank_with_fewer_batches_at_other_moments(expression: str, last: bool, steps: int) -> None:
    workers = enough(expression)
    guilty = workers - 1 if last else 0
    sentence = said(attempt(stop_early, expression, guilty, steps, workers=workers))
    names_who_stopped(sentence, guilty, None if expression.startswith("palsgd") else steps)


def test_a_rank_with_fewer_batches_where_no_round_comes_in_between() -> None:
    assert said(attempt(stop_early, "local_sgd(every=50)", 1, 5)) == (
        f"Workers disagree: rank 0 is in finish() at step 12, rank 1 in finish() at step 5. {BATCHES}"
    )


def other_rate(comm: offbeat.Communicator, expression: str, guilty: int) -> None:
    go(comm, expression, 12, lr=0.125 if comm.rank == guilty else 0.25)


def names_the_rates(sentence: str, expression: str, guilty: int) -> None:
    # In a subgroup the first of its ranks speaks for the others.
    other = 2 if guilty == 3 and expression.startswith("hierarchical") else 0 if guilty else 1
    low, high = ("0.125", "0.25") if guilty == 0 else ("0.25", "0.125")
    assert f"rank {min(guilty, other)} has learning rate {low}, rank {max(guilty, other)} {high}." in sentence
    assert sentence.endswith("Step the learning-rate scheduler on every worker.")


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize("expression", REAL)
def test_another_learning_rate(pool: Pool, expression: str, guilty: int) -> None:
    names_the_rates(said(pool.attempt(other_rate, expression, guilty)), expression, guilty)


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize(
    "expression",
    [
        "ddp()",
        "local_sgd(every=3)",
        "local_sgd(every=3, moments='average')",
        "local_sgd(every=3, delay=2)",
        "local_sgd(every=3, delay='round')",
        "hierarchical(nodes=2, inner=1, outer=4)",
        "hierarchical(nodes=2, inner=2, outer=4)",
        "diloco(every=3)",
        "streaming_diloco(every=4, fragments=2, delay=3)",
        "eager_diloco(every=2)",
        "overlap_local_sgd(every=3)",
    ],
)
def test_another_learning_rate_in_every_kind_of_method(expression: str, guilty: int) -> None:
    names_the_rates(said(attempt(other_rate, expression, guilty)), expression, guilty)


def other_plan(comm: offbeat.Communicator) -> None:
    go(comm, "local_sgd(every=QSR(alpha=1.0, base=2))", 40, lr=0.25 if comm.rank else 0.5)


def test_another_plan() -> None:
    """Periods that follow the learning rate differ with it: 4 steps on rank 0, 16 elsewhere."""
    assert said(attempt(other_plan)) == (
        "Workers disagree at round 0: rank 0 is at step 4, rank 1 at step 16. "
        "Does every worker use the same schedule?"
    )


def one_averages(comm: offbeat.Communicator) -> None:
    net = Dyadic()
    opt = optimizer_for(net)
    sync = offbeat.local_sgd(net, opt, every=2, group=comm)
    for step in range(4):
        net(data(comm.rank, step)).backward()
        sync.step()
        if comm.rank == 2 and step == 2:
            with sync.averaged():
                pass


def test_averaged_on_one_rank_only(pool: Pool) -> None:
    assert said(pool.attempt(one_averages)) == (
        f"Workers disagree: rank 0 is in round 1 at step 4, rank 2 in averaged() at step 3. {BATCHES}"
    )


def one_averages_aside(comm: offbeat.Communicator) -> None:
    net = Dyadic()
    opt = optimizer_for(net)
    sync = offbeat.eager_sgd(net, opt, every=4, grace=60.0, group=comm)
    for step in range(8):
        net(data(comm.rank, step)).backward()
        sync.step()
        if comm.rank == 2 and step == 2:
            with sync.averaged():
                pass


def test_averaged_on_one_rank_only_while_companions_wait_for_it(pool: Pool) -> None:
    for answers in (pool.attempt(one_averages_aside), attempt(one_averages_aside)):
        sentence = said(answers)
        # The first to see it words the sentence: it may be rank 2 itself or any other.
        assert re.search(r"rank 2 (is )?in averaged\(\) at step 3[,.] ", sentence), sentence
        assert sentence.endswith(BATCHES)


def other_model(comm: offbeat.Communicator, difference: str) -> None:
    net: nn.Module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    if comm.rank == 2:
        if difference == "shape":
            net[0] = nn.Linear(4, 2)
        elif difference == "dtype":
            net.double()
        elif difference == "layer":
            net.append(nn.Linear(2, 1))
        elif difference == "buffer":
            net[1] = nn.BatchNorm1d(2, track_running_stats=False)
        elif difference == "frozen":
            net[0].bias.requires_grad_(False)
    offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=0.1), group=comm)


@pytest.mark.parametrize(
    ("difference", "ours", "theirs"),
    [
        ("shape", "parameter 0.weight [2, 3] float32", "parameter 0.weight [2, 4] float32"),
        ("dtype", "parameter 0.weight [2, 3] float32", "parameter 0.weight [2, 3] float64"),
        ("layer", "buffer 1.running_mean [2] float32", "parameter 2.weight [1, 2] float32"),
        ("buffer", "buffer 1.running_mean [2] float32", "nothing more"),
    ],
)
def test_another_model(difference: str, ours: str, theirs: str) -> None:
    assert said(attempt(other_model, difference)) == (
        f"Workers disagree: rank 0 has {ours}, rank 2 has {theirs}. "
        "Build the same model and method on every worker."
    )


def test_a_parameter_frozen_on_one_rank(pool: Pool) -> None:
    sentence = said(pool.attempt(other_model, "frozen"))
    assert "rank 2 has parameter 0.bias [2] float32, frozen with checksum" in sentence


def other_method(comm: offbeat.Communicator, usual: str, odd: str) -> None:
    go(comm, odd if comm.rank == 1 else usual, 4)


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ("local_sgd(every=3)", "ddp()"),
        ("local_sgd(every=3)", "local_sgd(every=4)"),
        ("local_sgd(every=3, delay=1)", "local_sgd(every=3)"),
        ("local_sgd(moments='average')", "local_sgd()"),
        ("hierarchical(nodes=2)", "hierarchical(nodes=4)"),
        ("hierarchical(nodes=((0, 1), (2, 3)))", "hierarchical(nodes=((0, 2), (1, 3)))"),
    ],
)
def test_another_method_or_other_arguments(usual: str, odd: str) -> None:
    assert said(attempt(other_method, usual, odd)) == (
        f"Workers disagree: rank 0 has the method {usual}, rank 1 has the method {odd}. "
        "Build the same model and method on every worker."
    )


def test_another_method_among_processes(pool: Pool) -> None:
    args = other_method, "hierarchical(nodes=2)", "hierarchical(nodes=4)"
    assert said(pool.attempt(*args)) == said(attempt(*args))
