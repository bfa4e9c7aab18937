"""What rounds that lose something, or land late, still owe: every gradient, true drift, rates and bytes."""

from __future__ import annotations

import pytest
import torch
from sentences import says
from slopes import Walk
from torch import nn

import offbeat
from offbeat import Detached, ErrorFeedback, Every, Exchange, Outer, Quantized, TopK, params


class Two(nn.Module):
    """One parameter that always has a gradient, and one that seldom has."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = (nn.Parameter(torch.zeros(4096)) for _ in range(2))


def test_error_feedback_sends_what_it_kept_though_no_gradient_comes() -> None:
    def worker(comm: offbeat.Communicator) -> float:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.ddp(model, optimizer, reduce=ErrorFeedback(TopK(8)), group=comm)
        for step in range(12):
            model.often.grad = torch.ones(4096)
            model.seldom.grad = None if step else torch.ones(4096)
            sync.step()
            optimizer.zero_grad()
        return float(model.seldom.detach().sum())

    assert offbeat.simulate(worker, 2) == [-4096.0, -4096.0]


def test_a_scheduler_may_step_inside_the_local_step() -> None:
    """SlowMo's momentum is rescaled by the rates of the steps made, not of the next ones."""

    def worker(comm: offbeat.Communicator, inside: bool) -> torch.Tensor:
        model = nn.Linear(3, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        sync = offbeat.slowmo(model, optimizer, every=2, momentum=0.5, ramp=0, group=comm)
        for step in range(6):
            model.weight.grad = torch.full((2, 3), float(comm.rank + step))
            if inside:
                sync.step(lambda: (optimizer.step(), scheduler.step()))
            else:
                sync.step()
                scheduler.step()
        sync.finish()
        return model.weight.detach().clone()

    inside, after = (offbeat.simulate(lambda comm, i=i: worker(comm, i), 2) for i in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(inside, after, strict=True))


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_no_drift_is_told_where_something_was_lost() -> None:
    def worker(comm: offbeat.Communicator, expression: str) -> list[float | None]:
        model, optimizer = linear()
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        for _ in range(4):
            model.weight.grad = torch.ones(64, 64)
            sync.observe(1.0)
            sync.step()
        sync.finish()
        return [report.drift for report in sync.reports]

    def told(expression: str) -> set[float | None]:
        return set(offbeat.simulate(lambda comm: worker(comm, expression), 2)[0])

    assert told("local_sgd(every=2)") == {0.0}
    assert told("local_sgd(every=2, reduce=ErrorFeedback(TopK(64)))") == {None}
    assert told("adacomm(start=2, interval=2, reduce=Quantized(8))") == {None}


def test_what_decides_by_drift_needs_it_whole() -> None:
    model, optimizer = linear()
    with says(
        ValueError,
        f"Adaptive(start=4, sample=9, warmup=0) with reduce={Quantized(8)!r}: "
        "drift cannot be measured with a lossy reducer: use Mean().",
    ):
        offbeat.adaptive(model, optimizer, start=4, sample=9, reduce=Quantized(8))
    with says(
        ValueError,
        f"drift=True with reduce={Quantized(8)!r}: "
        "drift cannot be measured with a lossy reducer: use Mean().",
    ):
        offbeat.local_sgd(model, optimizer, reduce=Quantized(8), drift=True)


def test_detached_is_refused_with_a_delay() -> None:
    update = Detached(TopK(8))
    with says(ValueError, f"delay=2 with update={update!r}: the steps made during the delay would be lost."):
        Exchange(params(linear()[0]), when=Every(4), update=update, delay=2)


def test_bytes_of_a_round_in_flight_are_in_the_checkpoint() -> None:
    def worker(comm: offbeat.Communicator, cut: bool) -> list[int]:
        model, optimizer = linear()

        def begun() -> offbeat.Synchronizer:
            part = Exchange(params(model), when=Every(2), update=Outer(offbeat.SGD(1.0)), delay=2, among=comm)
            return offbeat.Synchronizer(optimizer, [part])

        sync = begun()
        for step in range(4):
            model.weight.grad = torch.ones(64, 64)
            sync.step()
            if cut and step == 2:
                saved = sync.state_dict()
                sync = begun()
                sync.load_state_dict(saved)
        sync.finish()
        return [report.bytes_sent for report in sync.reports if report.round == 0]

    whole, cut = (offbeat.simulate(lambda comm, c=c: worker(comm, c), 2) for c in (False, True))
    assert cut == whole
    assert whole[0][0] > 4 * 64 * 64


AVERAGING = [
    "local_sgd(every=3, {})",
    "local_sgd(every=3, delay=2, {})",
    "local_sgd(every=3, delay='round', {})",
    "post_local_sgd(switch=2, every=3, {})",
    "hierarchical(nodes=1, inner=1, outer=3, {})",
    "qsr(alpha=0.0, base=3, {})",
    "adacomm(start=3, interval=100, {})",
    "dasgd(every=3, delay=0, {})",
    "dasgd(every=3, delay=2, {})",
    "dasgd(every=3, delay='round', {})",
    "cocod(every=3, delay=2, {})",
    "a2sgd(every=3, {})",
]


@pytest.mark.few(12)
@pytest.mark.parametrize("reduce", ["Mean()", "Quantized(8, least=1)", "ErrorFeedback(TopK(2, least=1))"])
@pytest.mark.parametrize("start", AVERAGING)
def test_averaging_methods_show_the_mean_of_the_live_weights(start: str, reduce: str) -> None:
    """Whatever code they use, and wherever in a period they are asked: no stale anchor."""

    def worker(comm: offbeat.Communicator) -> tuple[list[float], list[float]]:
        walk = Walk(comm, start.format(f"reduce={reduce}"), slope=lambda rank, step: rank + 1.0 + step % 2)
        live, shown = [], []
        for _ in range(8):
            walk.sync.observe(1.0)
            live += walk.go()
            shown.append(walk.shown())
        return live, shown

    (first, shown), (second, same) = offbeat.simulate(worker, 2)
    assert shown == same
    assert shown == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], rel=1e-12)
