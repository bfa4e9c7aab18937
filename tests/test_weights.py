"""Workers of unequal weight: a round takes Σ w x / Σ w, where w adds up the samples since the last round."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, data, optimizer_for, reloaded, same, simulated, snapshot, train
from sentences import says
from table import BROAD, METHODS, enough
from torch import Tensor, nn

import offbeat
from offbeat import Exchange, Subgroups, params

UNWEIGHED = (
    "ssd_sgd",
    "od_sgd",
    "wagma",
    "eager_sgd",
    "gradient_code",
    "eager_diloco",
    "def_sgd",
    "a2sgd",
    "coda",
)
# With a budget, waiting for all weights takes time, so periods differ.
WEIGHED = [row for row in METHODS if not row.startswith(UNWEIGHED) and "Budget(" not in row]


@pytest.mark.few(6)
@pytest.mark.parametrize("expression", [row for row in WEIGHED if row in BROAD])
def test_equal_weights_change_no_bit(expression: str) -> None:
    """Three samples each: sums of threes would round."""
    plain, equal = simulated(expression), simulated(expression, samples=(3, 3, 3, 3))
    for a, b in zip(plain, equal, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


ONE_COUNTS = [
    "ddp()",
    "local_sgd(every=1)",
    "local_sgd(every=3, moments='average')",
    "local_sgd(every=3, delay=2, gain=1.0)",
    "slowmo(every=3, lr=1.0, momentum=0.5, ramp=0)",
    "diloco(every=3, lr=0.5, momentum=0.5, ramp=0)",
]


@pytest.mark.parametrize("expression", ONE_COUNTS)
def test_workers_without_samples_only_follow(expression: str) -> None:
    """Rank 0 alone has samples: everyone ends where it ends alone, with the same method."""
    four = simulated(expression, samples=(5, 0, 0, 0), optimizer="momentum", steps=12)
    (alone,) = simulated(expression, workers=1, optimizer="momentum", steps=12)
    assert all(same(trace[-1], alone[-1]) for trace in four)


class Line(nn.Module):
    """One weight; its gradient is what the worker says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, slope: float) -> Tensor:
        return slope * self.weight.sum()


def walk(comm: offbeat.Communicator, build: Any, samples: list[list[float]]) -> list[float]:
    """The weight after each step. Rank r has the gradient −4ʳ, so that it climbs by 4ʳ a step."""
    net = Line()
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = build(net, opt, comm) if callable(build) else offbeat.method(build)(net, opt, group=comm)
    trace = []
    for count in samples[comm.rank]:
        opt.zero_grad()
        net(-(4.0**comm.rank)).backward()
        sync.step(samples=count)
        trace.append(net.weight.item())
    return trace


def test_closed_forms() -> None:
    def walks(method: Any, *samples: list[float]) -> list[list[float]]:
        return offbeat.simulate(lambda comm: walk(comm, method, list(samples)), len(samples))

    # Steps of 1 and 4 with weights 1 and 3: (1·1 + 3·4)/4 = 3.25.
    assert walks("local_sgd(every=1)", [1.0], [3.0]) == [[3.25], [3.25]]
    # The same for gradients, whatever the unit of the weights.
    assert walks("ddp()", [0.5], [1.5]) == [[3.25], [3.25]]
    # Two steps each, and the weights add up: 1 + 0 and 1 + 2. (1·2 + 3·8)/4 = 6.5.
    assert walks("local_sgd(every=2)", [1, 0], [1, 2]) == [[1.0, 6.5], [4.0, 6.5]]
    # They begin again after each round: first rank 0 alone counts, then rank 1: 1, then 1 + 4.
    assert walks("local_sgd(every=1)", [1, 0], [0, 1]) == [[1.0, 5.0], [1.0, 5.0]]
    # Nobody has samples: the plain mean, 2.5.
    assert walks("local_sgd(every=1)", [0], [0]) == [[2.5], [2.5]]
    # The outer step takes the weighted mean displacement 3.25: lr 2 makes it 6.5.
    assert walks("diloco(every=1, lr=2.0, momentum=0.0)", [1], [3]) == [[6.5], [6.5]]
    # Delayed by a step: x ← x + gain·(mean − sent). Rank 0 has sent 2, and the mean is 6.5.
    whole = walks("local_sgd(every=2, delay=1, gain=1.0)", [0, 1, 5], [0, 3, 5])
    assert whole[0][1:] == [2.0, 3 + 6.5 - 2]
    half = walks("local_sgd(every=2, delay=1, gain=0.5)", [0, 1, 5], [0, 3, 5])
    assert half[0][1:] == [2.0, 3 + (6.5 - 2) / 2]


def test_samples_of_a_warmup_do_not_count_after_it() -> None:
    """Two steps of ddp, in which rank 0 has all samples; then rounds in which both have one."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        return walk(comm, "diloco(every=2, lr=1.0, momentum=0.0, warmup=2)", [[5, 5, 1, 1], [0, 0, 1, 1]])

    # Two steps of 1, then steps of 1 and of 4, whose mean is 2.5 each.
    assert offbeat.simulate(worker, 2) == [[1.0, 2.0, 3.0, 7.0], [1.0, 2.0, 6.0, 7.0]]


def test_weights_count_within_a_subgroup() -> None:
    """Ranks 0 and 1: (1·1 + 3·4)/4. Ranks 2 and 3 have equal weights: (16 + 64)/2."""

    def build(net: nn.Module, opt: torch.optim.Optimizer, comm: offbeat.Communicator) -> Any:
        exchange = Exchange(params(net), when=offbeat.Every(1), among=Subgroups(2, comm))
        return offbeat.Synchronizer(opt, [exchange])

    traces = offbeat.simulate(lambda comm: walk(comm, build, [[1], [3], [7], [7]]), 4)
    assert traces == [[3.25], [3.25], [40.0], [40.0]]


@pytest.mark.parametrize(
    "reduce", ["Mean()", "Mean('bfloat16', least=1)", "ErrorFeedback(Quantized(8, block=8, least=1))"]
)
def test_codes_send_the_weighted_values(reduce: str) -> None:
    weights = (1, 3, 2, 2)
    expression = f"diloco(every=3, lr=1.0, momentum=0.0, reduce={reduce})"
    exact = simulated("diloco(every=3, lr=1.0, momentum=0.0)", samples=weights)
    coded = simulated(expression, samples=weights)
    for name, tensor in exact[0][2].items():
        if tensor.is_floating_point():
            torch.testing.assert_close(coded[0][2][name], tensor, rtol=0.02, atol=0.3, msg=name)


def batches(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Rank r has 2r + 1 samples."""
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2 * rank + 1, 3, generator=g).double(), torch.randn(2 * rank + 1, generator=g).double()


def regress(comm: offbeat.Communicator, ranks: list[int], expression: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with offbeat.method(expression)(net, opt, group=comm) as sync:
        for step in range(5):
            x, y = (torch.cat(parts) for parts in zip(*(batches(rank, step) for rank in ranks), strict=True))
            opt.zero_grad()
            (net(x).squeeze(1) - y).square().mean().backward()
            sync.step(samples=len(x))
    return [p.detach().clone() for p in net.parameters()]


def test_ddp_with_uneven_batches_is_one_big_batch() -> None:
    uneven = offbeat.simulate(lambda comm: regress(comm, [comm.rank], "ddp()"), 3)
    whole = regress(offbeat.Solo(), [0, 1, 2], "ddp()")
    for worker in uneven:
        torch.testing.assert_close(worker, whole, rtol=1e-12, atol=1e-12)


def trained(comm: offbeat.Communicator, expression: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    return train(comm, expression, **options)


@pytest.mark.parametrize(
    "expression",
    [
        "ddp()",
        "local_sgd(every=3, delay=2, moments='average')",
        "diloco(every=3, lr=0.5, momentum=0.5, ramp=0)",
    ],
)
def test_simulation_equals_gloo(pool: Pool, expression: str) -> None:
    options = {"optimizer": "momentum", "samples": (1, 2, 5, 0)}
    real, virtual = pool.run(trained, expression, options), simulated(expression, **options)
    for a, b in zip(real, virtual, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_resume_in_the_middle_of_a_period(cut: int) -> None:
    def run(comm: offbeat.Communicator, cut: int | None) -> list[dict[str, Tensor]]:
        net = Dyadic()
        opt = optimizer_for(net)
        sync = offbeat.local_sgd(net, opt, every=3, delay=1, group=comm)
        for step in range(7):
            if step == cut:
                weights, state = reloaded(net.state_dict(), sync.state_dict())
                net = Dyadic(seed=9)
                net.load_state_dict(weights)
                opt = optimizer_for(net)
                sync = offbeat.local_sgd(net, opt, every=3, delay=1, group=comm)
                sync.load_state_dict(state)
            opt.zero_grad()
            net(data(comm.rank, step)).backward()
            sync.step(samples=2 ** (step % 3) if comm.rank else 3)
        return [snapshot(net)]

    whole = offbeat.simulate(lambda comm: run(comm, None), 2)
    resumed = offbeat.simulate(lambda comm: run(comm, cut), 2)
    assert all(same(a[-1], b[-1]) for a, b in zip(whole, resumed, strict=True))


def test_a_worker_without_weight_may_hold_nonsense() -> None:
    def worker(comm: offbeat.Communicator) -> float:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=1, group=comm)
        net(math.nan if comm.rank else -1.0).backward()
        sync.step(samples=1 - comm.rank)
        return net.weight.item()

    assert offbeat.simulate(worker, 2) == [1.0, 1.0]


@pytest.mark.parametrize("samples", [-1, math.nan, math.inf, True, "3"])
def test_samples_that_are_no_weight(samples: Any) -> None:
    net = Line()
    sync = offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=1.0), group=offbeat.Solo())
    with says(ValueError, f"step(samples={samples!r}): samples must be a finite number, at least 0."):
        sync.step(samples=samples)


@pytest.mark.parametrize("expression", [row for row in METHODS if row.startswith(UNWEIGHED)])
def test_methods_that_do_not_weigh_refuse(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        with pytest.raises(
            ValueError, match=r"^step\(samples=2\): .* does not weigh workers: omit samples\.$"
        ):
            train(comm, expression, samples=(2, 2, 2, 2))

    offbeat.simulate(worker, enough(expression))


def test_samples_on_some_workers_only(pool: Pool) -> None:
    sentence = (
        "Workers disagree in round 0 at step 3: rank 0 steps with samples=None, rank 2 with samples=6.0. "
        "Pass samples on every worker or on none."
    )
    for answers in (pool.attempt(some_give_samples), simulate_attempt()):
        assert [str(answer) for answer in answers] == [sentence] * 4


def some_give_samples(comm: offbeat.Communicator) -> None:
    train(comm, "local_sgd(every=3)", samples=(2, 2, 2, 2) if comm.rank == 2 else None)


def simulate_attempt() -> list[Any]:
    def worker(comm: offbeat.Communicator) -> Any:
        try:
            return some_give_samples(comm)
        except offbeat.Disagreement as error:
            return error

    return offbeat.simulate(worker, 4)
