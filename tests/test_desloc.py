"""Moments of the optimizer as live tensors, with periods of their own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, Realistic, data, optimizer_for
from sentences import says
from torch import nn

import offbeat
from offbeat import Adaptive, Correct, Every, Exchange, Quantized, Synchronizer, moments, params


def by_adam(comm: offbeat.Communicator, expression: str, steps: int) -> list[tuple[float, float, float]]:
    """x, its first and its second moment after every step. The gradient is 2 on rank 0 and 4 on rank 1."""
    model = nn.ParameterDict({"x": torch.zeros(1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.5, 0.5))
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    trace = []
    for _ in range(steps):
        model["x"].grad = torch.full((1,), 2.0 * comm.rank + 2)
        sync.step()
        state = optimizer.state[model["x"]]
        trace.append((model["x"].item(), state["exp_avg"].item(), state["exp_avg_sq"].item()))
    return trace


def test_three_periods_by_hand() -> None:
    """m ← m/2 + g/2 and v ← v/2 + g²/2, with the means of m after every step and of v after even ones.

    m: 1 and 2, mean 1.5; 1.75 and 2.75, mean 2.25; 2.125 and 3.125, mean 2.625.
    v: 2 and 8; 3 and 12, mean 7.5; 3.75 + 2 and 3.75 + 8.
    """
    first, second = offbeat.simulate(lambda comm: by_adam(comm, "desloc(every=3, first=1, second=2)", 3), 2)
    assert [row[1:] for row in first] == [(1.5, 2.0), (2.25, 7.5), (2.625, 5.75)]
    assert [row[1:] for row in second] == [(1.5, 8.0), (2.25, 7.5), (2.625, 11.75)]
    assert [a[0] == b[0] for a, b in zip(first, second, strict=True)] == [
        True,
        False,
        True,
    ]  # a first step has length lr


def test_by_default_moments_have_three_and_six_times_the_period() -> None:
    sync = offbeat.desloc(net := Dyadic(), optimizer_for(net), every=4)
    assert [part.when for part in sync.parts] == [Every(4), Every(12), Every(24)]


def uneven(comm: offbeat.Communicator) -> list[float]:
    """Rank 1 never uses the second parameter, so it has no moment of it."""
    net = nn.ParameterList([torch.zeros(1) for _ in range(2)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    sync = offbeat.desloc(net, optimizer, every=2, first=1, second=1, group=comm)
    for i in range(2 - comm.rank):
        net[i].grad = torch.full((1,), 2.0 * comm.rank + i + 1)
    sync.step()
    return [optimizer.state[p]["momentum_buffer"].item() for p in net if p in optimizer.state]


def test_moments_that_not_all_workers_have_stay(pool: Pool) -> None:
    assert pool.run(uneven, workers=2) == offbeat.simulate(uneven, 2) == [[2.0, 2.0], [2.0]]


def test_each_round_is_reported_and_sends_what_it_must() -> None:
    """Two workers send each tensor once: 4 bytes per value, a header per round, and two numbers of drift."""

    def worker(comm: offbeat.Communicator) -> list[tuple[int, int, float | None]]:
        net = Realistic(comm.rank)
        optimizer = optimizer_for(net, "adamw")
        sync = offbeat.desloc(net, optimizer, every=1, first=2, second=4, buffers="keep", group=comm)
        for step in range(4):
            net(data(comm.rank, step)).backward()
            sync.step()
            optimizer.zero_grad()
        return [(report.step, report.bytes_sent, report.drift) for report in sync.reports]

    values = sum(p.numel() for p in Realistic().parameters())
    for reports in offbeat.simulate(worker, 2):
        assert sorted(step for step, *_ in reports) == [1, 2, 2, 3, 4, 4, 4]
        seen = [(sent - 4 * values, drift is None) for _, sent, drift in reports]
        assert sorted(seen) == [(64, True)] * 3 + [(80, False)] * 4


def test_the_optimizer_may_lack_an_entry(caplog: pytest.LogCaptureFixture) -> None:
    """SGD has no second moments: said once, and no more than headers is sent."""
    with caplog.at_level(logging.WARNING, "offbeat"):
        offbeat.simulate(lambda comm: by_sgd(comm), 1)
    assert [record.getMessage() for record in caplog.records] == [
        "moments('exp_avg_sq', 'square_avg', 'exp_inf'): the optimizer's state has no such entry after "
        "step 2: nothing is averaged. It has momentum_buffer."
    ]


def by_sgd(comm: offbeat.Communicator) -> None:
    net = nn.ParameterDict({"x": torch.zeros(1)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    sync = offbeat.desloc(net, optimizer, every=2, first=2, second=2, group=comm)
    for _ in range(6):
        net["x"].grad = torch.ones(1)
        sync.step()


def test_moments_of_several_optimizers() -> None:
    """Each has its own entries; both are averaged."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        net = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        both = [torch.optim.SGD([net[0]], lr=0.5, momentum=0.5), torch.optim.Adam([net[1]], betas=(0.5, 0.5))]
        sync = offbeat.desloc(net, both, every=2, first=1, second=1, group=comm)
        for p in net:
            p.grad = torch.full((1,), 2.0 * comm.rank + 2)
        sync.step()
        state = both[1].state[net[1]]
        return [
            both[0].state[net[0]]["momentum_buffer"].item(),
            state["exp_avg"].item(),
            state["exp_avg_sq"].item(),
        ]

    assert offbeat.simulate(worker, 2) == [[3.0, 1.5, 5.0]] * 2


@pytest.mark.parametrize(
    ("kind", "key"), [(torch.optim.Adamax, "exp_inf"), (torch.optim.RMSprop, "square_avg")]
)
def test_second_moments_have_other_names_elsewhere(kind: Any, key: str) -> None:
    def worker(comm: offbeat.Communicator) -> float:
        net = nn.ParameterList([torch.zeros(1)])
        optimizer = kind(net.parameters(), lr=0.5)
        sync = offbeat.desloc(net, optimizer, every=9, first=9, second=1, group=comm)
        net[0].grad = torch.full((1,), 2.0 * comm.rank + 2)
        sync.step()
        return optimizer.state[net[0]][key].item()

    one, two = offbeat.simulate(worker, 2)
    assert one == two > 0


NET = Dyadic()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: moments(NET),
            'moments(model): name entries of the optimizer\'s state, such as "exp_avg".',
        ),
        (
            lambda: Exchange(moments(NET, "exp_avg"), when=Every(2), update=Correct()),
            "update=Correct(gain=1.0) with moments('exp_avg'): moments are averaged: leave update out.",
        ),
        (
            lambda: Exchange(moments(NET, "exp_avg"), when=Every(2), reduce=Quantized(8)),
            f"reduce={Quantized(8)!r} with moments('exp_avg'): moments are sent exactly; leave reduce out.",
        ),
        (
            lambda: Exchange(moments(NET, "exp_avg"), when=Every(2), moments="reset"),
            "moments='reset' with moments('exp_avg'): an exchange of moments averages them.",
        ),
        (
            lambda: Exchange(moments(NET, "exp_avg"), when=Adaptive(2, 4)),
            "Adaptive(start=2, sample=4, warmup=0) with moments('exp_avg'): rounds of moments measure "
            "neither drift nor loss.",
        ),
        (
            lambda: offbeat.desloc(NET, optimizer_for(NET), every=offbeat.QSR(alpha=0.1)),
            "desloc(every=QSR(alpha=0.1, base=4, warmup=0, peak=None, total=None, power=2.0)): 3 and 6 times "
            "this are not defined: give first= and second= too.",
        ),
    ],
)
def test_sentences(make: Any, sentence: str) -> None:
    with says(ValueError, sentence):
        make()


def test_a_delay_keeps_moments_between_what_they_were_and_the_mean() -> None:
    """v is 2 and 8 when it leaves. A step later it is 3 and 12, which the mean 5 moves by 3 and −3.

    3 + 3 would be past the mean.
    """

    def worker(comm: offbeat.Communicator) -> float:
        model = nn.ParameterDict({"x": torch.zeros(1)})
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.5))
        late = Exchange(moments(model, "exp_avg_sq"), when=Every(3, offset=1), among=comm, delay=1)
        sync = Synchronizer(optimizer, [Exchange(params(model), when=Every(9), among=comm), late])
        for _ in range(2):
            model["x"].grad = torch.full((1,), 2.0 * comm.rank + 2)
            sync.step()
        return optimizer.state[model["x"]]["exp_avg_sq"].item()

    assert offbeat.simulate(worker, 2) == [5.0, 9.0]
