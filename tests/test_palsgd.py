"""PALSGD: pulls toward the anchor between gradient steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection

import pytest
import torch
from conftest import Pool
from problems import Realistic, same, simulated
from slopes import Slopes, Walk, walked

import offbeat
from offbeat.base.draws import uniform


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The iterations after which a pull follows, to be filled in by the test."""
    chosen: set[int] = set()
    monkeypatch.setattr(
        "offbeat.engine.pull.uniform", lambda seed, step, *more: 0.0 if step in chosen else 1.0
    )
    return chosen


def test_by_hand(hits: set[int]) -> None:
    # γ = 0.25, p = 0.5, η = 1: steps of 0.25/(1 − 0.5) = 0.5, pulls by 0.25·1/0.5 = 0.5. Slopes 1 and 3.
    # Outer lr 1, momentum 0.5; pulls follow the iterations 1, 3, 4 and 7.
    #  1 step   −0.5, −1.5
    #  2 pull   −0.25, −0.75
    #  3 step   −0.75, −2.25
    #  4 pull   −0.375, −1.125      the round: Δ = 0.75, b = 0.75, d = 1.125, a = −1.125
    #  5 pull   x = a: stays
    #  6 step   −1.625, −2.625
    #  7 step   −2.125, −4.125
    #  8 pull   −1.625, −2.625      the round: Δ = 1, b = 0.375 + 1, d = 1 + 0.6875, a = −2.8125
    #  9 step   −3.3125, −4.3125
    hits |= {1, 3, 4, 7}

    def worker(comm: offbeat.Communicator) -> tuple[list[float], list[int], list[int]]:
        walk = Walk(comm, "palsgd(every=4, p=0.5, eta=1.0, lr=1.0, momentum=0.5, ramp=0)", lr=0.25)
        trace, steps = [], []
        for _ in range(5):
            trace += walk.go()
            steps.append(walk.sync.steps)
        return trace, steps, walk.rounds

    first, second = offbeat.simulate(worker, 2)
    assert first[0] == [-0.25, -1.125, -1.625, -2.8125, -3.3125]
    assert second[0] == [-0.75, -1.125, -2.625, -2.8125, -4.3125]
    assert first[1:] == second[1:] == ([2, 5, 6, 8, 9], [4, 8])


def test_all_tensors_are_pulled_by_the_rates_of_their_groups(hits: set[int]) -> None:
    # p = 0.5, η = 1: steps of 2γ on slope 1, then a pull by min(1, 2γ) towards 0.
    # γ = 1/8: −0.25·0.75;   γ = 1/4: −0.5·0.5;   γ = 4: −8·0
    hits.add(1)
    walk = Walk(offbeat.Solo(), "palsgd(p=0.5, eta=1.0)", layers=3, lr=lambda step: [1 / 8, 1 / 4, 4])
    walk.go()
    assert walk.net.weights == [-0.1875, -0.25, 0.0]


def test_eta_pulls_harder(hits: set[int]) -> None:
    # p = 0.25, γ = 0.125: a step of 0.125/0.75, then a pull by 0.125·η/0.25 = η/2.
    hits.add(1)
    for eta in (0.0, 0.5, 1.0):
        walk = Walk(offbeat.Solo(), f"palsgd(p=0.25, eta={eta})", lr=0.125)
        assert walk.go() == [pytest.approx(-(1 - eta / 2) / 6, rel=1e-15)]


# The rates.


def test_rates_are_scaled_in_the_optimizers_own_step_only(hits: set[int]) -> None:
    hits |= {1, 4}
    net = Slopes(2)
    groups = [
        {"params": layer.parameters(), "lr": lr} for layer, lr in zip(net.layers, (0.5, 0.25), strict=True)
    ]
    opt = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)  # multiplies the rate it finds
    sync = offbeat.palsgd(net, opt, p=0.5, every=3)
    outside, moved = [], []

    def local() -> str:
        outside.append([group["lr"] for group in opt.param_groups])
        before = net.weights
        opt.step()
        moved.append([x - y for x, y in zip(before, net.weights, strict=True)])
        outside.append([group["lr"] for group in opt.param_groups])
        return "done"

    for _ in range(3):
        net(1.0).backward()
        assert sync.step(local) == "done"
        opt.zero_grad()
        outside.append([group["lr"] for group in opt.param_groups])
        scheduler.step()
    rates = [[0.5, 0.25], [0.25, 0.125], [0.125, 0.0625]]
    assert outside == [lr for lr in rates for _ in range(3)]
    assert moved == [[2 * a, 2 * b] for a, b in rates]


def test_a_frameworks_own_step_is_scaled_too() -> None:
    net = Slopes()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    sync = offbeat.palsgd(net, opt, p=0.5)
    net(1.0).backward()
    sync.before_step()
    assert opt.param_groups[0]["lr"] == 0.5
    opt.step()
    assert net.weights == [-1.0]
    sync.after_step()
    assert opt.param_groups[0]["lr"] == 0.5


def test_nothing_stays_with_the_optimizer() -> None:
    """After a step, and after an error in one, the optimizer has the user's rate again."""
    net = Slopes()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    sync = offbeat.palsgd(net, opt, p=0.5)
    net(1.0).backward()
    sync.step()
    before = net.weights[0]
    opt.step()
    assert before - net.weights[0] == 0.5

    def failing() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sync.step(failing)
    before = net.weights[0]
    opt.step()
    assert before - net.weights[0] == 0.5


class Fragile(torch.optim.SGD):
    """Fails in the middle of its first step, while its rates are scaled."""

    failed = False

    def step(self, closure: object = None) -> None:
        if not self.failed:
            self.failed = True
            raise ZeroDivisionError
        super().step()


@pytest.mark.parametrize("again", [False, True], ids=["raised", "tried again"])
def test_rates_come_back_after_an_error(again: bool) -> None:
    net = Slopes()
    opt = Fragile(net.parameters(), lr=0.5)
    sync = offbeat.palsgd(net, opt, p=0.5)
    net(1.0).backward()

    def local() -> None:
        with contextlib.suppress(*[ZeroDivisionError] if again else []):
            opt.step()
        if again:
            opt.step()

    with contextlib.nullcontext() if again else pytest.raises(ZeroDivisionError):
        sync.step(local)
    assert opt.param_groups[0]["lr"] == 0.5
    assert net.weights == [-1.0 if again else 0.0]


def test_rates_come_back_when_another_part_fails() -> None:
    """Even if it fails before the local step, in any order of the parts."""

    class Failing(offbeat.Part):
        def __init__(self, exchange: offbeat.Exchange) -> None:
            self.model, self.peers = exchange.model, exchange.peers

        def before(self, clock: offbeat.Clock) -> bool:
            raise ZeroDivisionError

    net = Slopes()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    outer = offbeat.Exchange(
        offbeat.params(net), when=offbeat.Every(4), update=offbeat.Outer(offbeat.SGD(lr=1.0))
    )
    sync = offbeat.Synchronizer(opt, [outer, offbeat.PseudoSync(outer, p=0.5, eta=1.0), Failing(outer)])
    net(1.0).backward()
    with pytest.raises(ZeroDivisionError):
        sync.step()
    assert opt.param_groups[0]["lr"] == 0.5


def test_a_rate_that_is_a_tensor_comes_back_itself() -> None:
    net = Slopes()
    lr = torch.tensor(0.5)
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    sync = offbeat.palsgd(net, opt, p=0.5)
    net(1.0).backward()
    sync.step()
    assert opt.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


def test_the_rate_of_rounds_and_plans_is_the_users_own(hits: set[int]) -> None:
    """(0.5/0.25)² = 4 iterations, then (0.5/0.125)² = 16; twice the rates would plan 2 and 4."""
    hits |= {1, 3, 10}

    def worker(comm: offbeat.Communicator) -> list[int]:
        walk = Walk(
            comm,
            "palsgd(every=QSR(alpha=0.5, base=2), p=0.5)",
            lr=lambda step: [0.25 if step < 2 else 0.125],
        )
        walk.go(18)
        return walk.rounds

    assert offbeat.simulate(worker, 2) == [[4, 20]] * 2


# The optimizer's own state.


def test_moments_and_steps_are_untouched_by_pulls(hits: set[int]) -> None:
    """On a slope gradients do not depend on the weights, so Adam's moments are those without any pulls."""

    def moments(pulls: Collection[int]) -> tuple[list[float], int]:
        hits.clear()
        hits.update(pulls)
        walk = Walk(offbeat.Solo(), "palsgd(every=100, p=0.5)", optimizer=torch.optim.Adam)
        walk.go(4)
        (state,) = walk.opt.state.values()
        return [state[key].item() for key in ("step", "exp_avg", "exp_avg_sq")], walk.sync.steps

    plain, steps = moments(())
    pulled, more = moments({1, 2, 4, 5})
    assert pulled == plain
    assert plain[0] == 4
    assert (steps, more) == (4, 8)


# The draws.


@pytest.mark.parametrize("seed", [0, 7])
def test_draws_are_equal_everywhere_and_steps_counts_pulls(seed: int) -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        walk = Walk(comm, f"palsgd(every=16, p=0.25, seed={seed})", lr=0.01)
        steps = []
        for _ in range(40):
            walk.go()
            steps.append(walk.sync.steps)
        return steps

    expected, n = [], 0
    for _ in range(40):
        n += 1
        while uniform(seed, n) < 0.25:
            n += 1
        expected.append(n)
    assert offbeat.simulate(worker, 3) == [expected] * 3
    assert expected[-1] > 45


def test_draws_have_their_probability() -> None:
    """10 000 draws of 0.1: mean 1 000, standard deviation 30."""
    for seed in range(3):
        assert abs(sum(uniform(seed, step) < 0.1 for step in range(10_000)) - 1000) < 4 * 30


def alone(comm: offbeat.Communicator, steps: int) -> tuple[int, int, list[int]]:
    """How often this rank was pulled, its iterations, and the steps of its rounds."""
    walk = Walk(comm, "palsgd(every=10, p=0.3, shared=False, warmup=2, seed=3)", lr=0.01)
    pseudo = walk.sync.parts[2]
    pulls = []
    pull = pseudo._pull
    pseudo._pull = lambda: (pulls.append(walk.sync.steps), pull())
    walk.go(steps)
    walk.finish()
    assert min(pulls) > 2
    return len(pulls), walk.sync.steps, walk.rounds


# Warm-up averages gradients in two steps; 10·(1 − 0.3) = 7 gradient steps to a round.
ALONE = (30, [1, 2, 9, 16, 23, 30])


def test_own_draws_differ_but_rounds_do_not() -> None:
    results = offbeat.simulate(lambda comm: alone(comm, 30), 4)
    assert [result[1:] for result in results] == [ALONE] * 4
    pulls = [result[0] for result in results]
    assert len(set(pulls)) > 1
    assert 4 * 28 * 0.3 / 0.7 == pytest.approx(sum(pulls), rel=0.5)  # 48 expected, standard deviation 8


@pytest.mark.slow
def test_own_draws_cannot_hang_real_workers(pool: Pool) -> None:
    assert pool.run(alone, 30) == offbeat.simulate(lambda comm: alone(comm, 30), 4)


# The periods.


def test_warm_up_averages_gradients_and_then_takes_the_anchor() -> None:
    # Three steps of lr 0.25 on the mean slope 2, unscaled: −1.5, the anchor. The first round comes at 3 + 4.
    def worker(comm: offbeat.Communicator) -> tuple[list[float], int, float, list[int]]:
        walk = Walk(comm, "palsgd(every=4, p=0.9, warmup=3, seed=1)", lr=0.25)
        trace = walk.go(3)
        steps = walk.sync.steps
        walk.go(1)
        anchor = walk.state(1)["anchor"][0].item()
        walk.go(5)
        return trace, steps, anchor, walk.rounds

    assert uniform(1, 4) > 0.9  # nothing follows the first step after the warm-up
    for trace, steps, anchor, rounds in offbeat.simulate(worker, 2):
        assert trace == [-0.5, -1.0, -1.5]
        assert steps == 3
        assert anchor == -1.5
        assert rounds[:5] == [1, 2, 3, 7, 11]


def test_the_first_draw_follows_the_first_step_after_the_warm_up(hits: set[int]) -> None:
    hits |= {1, 2, 3, 4}
    walk = Walk(offbeat.Solo(), "palsgd(every=100, p=0.5, warmup=3)")
    steps = [walk.go() and walk.sync.steps for _ in range(4)]
    assert steps == [1, 2, 3, 5]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("shared", [True, False])
def test_without_pulls_it_is_diloco_to_the_bit(optimizer: str, shared: bool) -> None:
    options = {"model": Realistic, "optimizer": optimizer, "decay": 0.9, "workers": 2, "steps": 7}
    torch.manual_seed(0)
    these = simulated(f"palsgd(every=3, p=0.0, shared={shared})", **options)
    torch.manual_seed(0)
    those = simulated("diloco(every=3)", **options)
    for mine, other in zip(these, those, strict=True):
        assert all(same(a, b) for a, b in zip(mine, other, strict=True))


def test_the_seed_matters() -> None:
    traces = [walked(f"palsgd(every=8, p=0.5, seed={seed})", 8, lr=0.25) for seed in (0, 0, 1)]
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "eta"), [(0.25, 1.0), (0.5, 0.5)])
def test_the_stationary_point_of_the_expected_iteration(p: float, eta: float) -> None:
    """That of f + (η/2)|x − a|² with f = ½(x − 1)² and a = 0: 1/(1 + η).

    Iterations are x + γ·noise − γ(1 + η)(x − x*), the noise of a draw between a step 1/(1 − p)·(1 − x) and a
    pull −η/p·x having, near x*, the deviation σ = √(p(1 − p))·(x*(η/p) + (1 − x*)/(1 − p)). So the mean of N
    iterations deviates by σ/((1 + η)√N); four times that is the bound.
    """
    steps, burn_in, lr = 4000, 400, 0.02
    net = Slopes()
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    sync = offbeat.palsgd(net, opt, every=10**9, p=p, eta=eta)
    seen = []
    weight = net.layers[0][0]
    for _ in range(steps):
        weight.grad = weight.detach() - 1
        sync.step()
        seen.append(weight.item())
    target = 1 / (1 + eta)
    noise = (p * (1 - p)) ** 0.5 * (target * eta / p + (1 - target) / (1 - p))
    bound = 4 * noise / ((1 + eta) * ((steps - burn_in) / (1 - p)) ** 0.5)
    assert bound < 0.05
    assert abs(sum(seen[burn_in:]) / (steps - burn_in) - target) < bound


def test_pulled_workers_stay_closer() -> None:
    def spread(p: float) -> float:
        ends = [trace[-1] for trace in simulated(f"palsgd(every=100, p={p}, eta=2.0)", **options)]
        return (ends[0]["body.0.weight"] - ends[1]["body.0.weight"]).norm().item()

    options = {"model": Realistic, "workers": 2, "steps": 20, "finish": False}
    torch.manual_seed(0)
    assert spread(0.3) < 0.7 * spread(0.0)


# Bad input.


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("palsgd(p=1.0)", "PseudoSync(p=1.0, eta=0.5): p is the share of pulls: at least 0, below 1."),
        ("palsgd(p=1)", "PseudoSync(p=1, eta=0.5): p is the share of pulls: at least 0, below 1."),
        ("palsgd(p=-0.1)", "PseudoSync(p=-0.1, eta=0.5): p is the share of pulls: at least 0, below 1."),
        (
            "palsgd(p=1.5, shared=False)",
            "PseudoSync(p=1.5, eta=0.5): p is the share of pulls: at least 0, below 1.",
        ),
        ("palsgd(eta=-1.0)", "PseudoSync(p=0.1, eta=-1.0): eta must not be negative."),
        ("palsgd(every=0)", "Every(steps=0): steps must be at least 1."),
        ("palsgd(every=0, shared=False)", "Every(steps=0): steps must be at least 1."),
        (
            "palsgd(warmup=-1)",
            "-1 synchronous steps: this must be a whole number, at least 0.",
        ),
    ],
)
def test_bad_numbers(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Walk(offbeat.Solo(), expression)


def test_a_pull_needs_an_anchor() -> None:
    model = torch.nn.Linear(2, 1)
    exchange = offbeat.Exchange(offbeat.params(model), when=offbeat.Every(4), among=offbeat.Solo())
    sentence = (
        f"PseudoSync(p=0.1, eta=0.5) after {exchange!r}: the exchange needs an anchor: use "
        "update=Outer(SGD(lr=0.7))."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        offbeat.PseudoSync(exchange, p=0.1, eta=0.5)


def test_a_pull_before_the_first_period_is_refused(hits: set[int]) -> None:
    hits.add(2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    when = offbeat.Then(4, offbeat.Never(), offbeat.Every(4))
    outer = offbeat.Outer(offbeat.SGD(lr=0.7))
    exchange = offbeat.Exchange(offbeat.params(model), when=when, update=outer)
    sync = offbeat.Synchronizer(optimizer, [exchange, offbeat.PseudoSync(exchange, p=0.1, eta=0.5, warmup=1)])
    sync.step()
    sentence = (
        f"PseudoSync(warmup=1): {when!r} has no anchor yet, because its first period begins later: give both "
        "the same warm-up."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        sync.step()


def test_own_draws_need_a_number_of_iterations() -> None:
    sentence = "every=Every(steps=8) with shared=False: every must be a whole number of iterations."
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        Walk(offbeat.Solo(), "palsgd(every=Every(8), shared=False)")
