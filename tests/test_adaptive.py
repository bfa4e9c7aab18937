"""Periods that follow the drift or the loss: Adaptive and AdaComm."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from slopes import Slopes, Walk, walked

import offbeat
from offbeat import AdaComm, Adaptive, Clock


def planned(when: offbeat.Schedule, told: Sequence[tuple[float, float]], what: str) -> list[int]:
    """The rounds planned, when the rounds tell such drifts or losses and rates."""
    state = when.init()
    rounds = [when.next(Clock(step=0, round=0, lr=1.0), state)]
    for value, lr in told:
        clock = Clock(step=rounds[-1], round=len(rounds), lr=1.0, round_lr=lr, **{what: value})
        rounds.append(when.next(clock, state))
    return rounds


def periods(when: offbeat.Schedule, told: Sequence[tuple[float, float]], what: str) -> list[int]:
    rounds = [0, *planned(when, told, what)]
    return [after - before for before, after in itertools.pairwise(rounds)]


def drifts(when: Adaptive, told: Sequence[tuple[float, float]]) -> list[int]:
    return periods(when, told, "drift")


def losses(when: AdaComm, told: Sequence[tuple[float, float]]) -> list[int]:
    return periods(when, told, "loss")


# Adaptive, by hand.


def test_the_period_follows_the_drift() -> None:
    # Rounds at 4 and 8 are sampled: C = (8 + 12)/2 = 10 at γ = 1. Bounds: 7 and 13.
    told = [(8, 1), (12, 1), (6.9, 1), (7, 1), (13, 1), (13.1, 1), (0, 1), (0, 1), (99, 1)]
    assert drifts(Adaptive(start=4, sample=10), told) == [4, 4, 4, 5, 5, 5, 4, 5, 6, 5]


def test_the_expected_drift_goes_with_the_rate() -> None:
    # C = mean of 8/2 and 3/0.5 = 5. At γ = 0.1 bounds are 0.35 and 0.65, at γ = 10 they are 35 and 65.
    told = [(8, 2), (3, 0.5), (0.34, 0.1), (0.36, 0.1), (0.66, 0.1), (34, 10), (36, 10), (66, 10)]
    assert drifts(Adaptive(start=4, sample=10), told) == [4, 4, 4, 5, 5, 4, 5, 5, 4]


def test_the_period_is_at_least_one() -> None:
    assert drifts(Adaptive(start=2, sample=3), [(1, 1), (9, 1), (9, 1), (9, 1), (0, 1)]) == [2, 2, 1, 1, 1, 2]


def test_drift_in_the_warm_up_counts_for_nothing() -> None:
    # Rounds at 2, 4 (warm-up), 6, 8 (sampled: C = 10), then 10 and 12.
    when = Adaptive(start=2, sample=9, warmup=5)
    assert drifts(when, [(1000, 1), (0, 1), (10, 1), (10, 1), (8, 1), (6, 1)]) == [2, 2, 2, 2, 2, 2, 3]
    # A round at the very step `warmup` is sampled, one at `sample` is not.
    assert drifts(Adaptive(start=2, sample=4, warmup=2), [(10, 1), (6, 1)]) == [2, 2, 3]


def test_sampling_goes_on_until_a_round_fell_into_it() -> None:
    # The first round, at 8, is after `sample` = 3: it is the sample, C = 10, and only it.
    assert drifts(Adaptive(start=8, sample=3), [(10, 1), (6, 1), (14, 1)]) == [8, 8, 9, 8]


def test_rounds_at_a_rate_of_zero_are_ignored() -> None:
    # C = 10 from the round at 4 alone; a 0 later on changes nothing either.
    told = [(50, 0), (10, 1), (0, 0), (50, 0), (6, 1), (0, 0)]
    assert drifts(Adaptive(start=2, sample=5), told) == [2, 2, 2, 2, 2, 3, 3]
    # Nothing but zeros in the sampling window: the next round is the sample.
    assert drifts(Adaptive(start=2, sample=3), [(50, 0), (10, 1), (6, 1)]) == [2, 2, 2, 3]


def test_a_round_is_learned_from_once() -> None:
    when = Adaptive(start=2, sample=3)
    state = when.init()
    for step, round, expected in [(0, 0, 2), (2, 1, 4), (4, 2, 7), (5, 2, 8)]:
        drift = None if round == 0 else [10.0, 1.0][round - 1]
        clock = Clock(step=step, round=round, lr=1.0, drift=drift, round_lr=1.0)
        assert when.next(clock, state) == expected


def test_one_worker_keeps_its_period() -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        walk = Walk(comm, "adaptive(start=3, sample=4)")
        walk.go(12)
        return walk.rounds

    assert offbeat.simulate(worker, 1) == [[3, 6, 9, 12]]


def test_adaptive_end_to_end() -> None:
    # Slopes ±d around 1 and lr γ: the drift of H steps is (Hγd)², so S/γ = H²γd².
    # d = 2 for the rounds at 2 and 4: C = 16. Then γ = 0.5: expected is 8; with d = 2 S = 4, so the period
    # grows after 6: (3·0.5·2)² = 9 at 9, which is within; d = 4 gives 36 at 12, so it shrinks.
    def slope(rank: int, step: int) -> float:
        return 1 + (2 * rank - 1) * (2.0 if step < 9 else 4.0)

    def worker(comm: offbeat.Communicator) -> tuple[list[int], list[float | None]]:
        walk = Walk(
            comm, "adaptive(start=2, sample=5)", slope=slope, lr=lambda step: [1.0 if step < 4 else 0.5]
        )
        walk.go(14)
        return walk.rounds, [report.drift for report in walk.sync.reports]

    assert offbeat.simulate(worker, 2) == [([2, 4, 6, 9, 12, 14], [16, 16, 4, 9, 36, 16])] * 2


# AdaComm, by hand.


def test_the_period_follows_the_loss() -> None:
    # τ₀ = 8, intervals of 8 steps. F₀ = 16, γ₀ = 1 from the first round.
    # F = 4:     8·√(4/16) = 4 < 8                                → 4
    # then two rounds to an interval, F = (3 + 5)/2 = 4: 4 is not smaller    → 4/2 = 2
    # four rounds, F = 0.25: 8·√(1/64) = 1                        → 1
    told = [(16, 1), (4, 1), (3, 1), (5, 1), *[(0.25, 1)] * 4]
    assert losses(AdaComm(start=8, interval=8), told) == [8, 8, 4, 4, 2, 2, 2, 2, 1]


def test_the_period_is_rounded_up() -> None:
    # 10·√(5/16) = 5.59
    assert losses(AdaComm(start=10, interval=10), [(16, 1), (5, 1)]) == [10, 10, 6]


def test_a_falling_rate_allows_a_longer_period_that_is_not_taken() -> None:
    # √(γ₀/γ · F/F₀): γ = 1/4 and F = 4 of 16 give √1·8 = 8, not smaller: halved. γ = 1 gives 4.
    assert losses(AdaComm(start=8, interval=8), [(16, 1), (4, 0.25)]) == [8, 8, 4]
    assert losses(AdaComm(start=12, interval=12), [(16, 1), (4, 0.5)]) == [12, 12, 9]  # 12·√½ = 8.49
    assert losses(AdaComm(start=12, interval=12), [(16, 0.5), (4, 1)]) == [12, 12, 5]  # 12·√⅛ = 4.24


def test_the_period_never_rises() -> None:
    told = [(1, 1)] + [(loss, 1.0) for loss in (100.0, 7.0, 0.5, 1e9, 3.0, 0.1) for _ in range(8)]
    found = losses(AdaComm(start=8, interval=8), told)
    assert found == sorted(found, reverse=True)
    assert found[:3] == [8, 8, 4]
    assert found[-1] == 1


def test_odd_periods_are_halved_upwards() -> None:
    assert losses(AdaComm(start=5, interval=5), [(1, 1), (9, 1)]) == [5, 5, 3]


def test_a_loss_below_zero_counts_as_zero() -> None:
    assert losses(AdaComm(start=8, interval=8), [(16, 1), (-3, 1)]) == [8, 8, 1]


@pytest.mark.parametrize("first", [0.0, -1.0])
def test_a_first_loss_that_is_not_positive_halves(first: float) -> None:
    assert losses(AdaComm(start=8, interval=8), [(first, 1), (4, 1)]) == [8, 8, 4]


def test_a_rate_of_zero_halves() -> None:
    assert losses(AdaComm(start=8, interval=8), [(16, 1), (0.01, 0)]) == [8, 8, 4]
    # At the end of the first interval: nothing can be compared with it.
    assert losses(AdaComm(start=8, interval=8), [(16, 0), (16, 1)]) == [8, 8, 4]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_no_number_halves(bad: float) -> None:
    assert losses(AdaComm(start=8, interval=8), [(16, 1), (bad, 1)]) == [8, 8, 4]
    assert losses(AdaComm(start=8, interval=8), [(bad, 1), (4, 1)]) == [8, 8, 4]


def test_the_warm_up_is_no_interval() -> None:
    # Rounds at 4 (warm-up), 8 (F₀ = 16), 12 (F = 4).
    assert losses(AdaComm(start=4, interval=4, warmup=4), [(1000, 1), (16, 1), (4, 1)]) == [4, 4, 4, 2]
    # Intervals are counted from it: with 6, the first ends at 10, and the round at 12 makes F₀ = 10.
    told = [(1000, 1), (16, 1), (4, 1), (2.5, 1)]
    assert losses(AdaComm(start=4, interval=4, warmup=6), told) == [4, 4, 4, 4, 2]


def test_the_loss_of_an_interval_is_weighted_by_steps() -> None:
    """Rounds at 4, then 2 steps apart: intervals of 6 hold a round of 4 and one of 2."""
    when = AdaComm(start=8, interval=6)
    state = when.init()
    state["period"] = 2
    for step, round, loss in [(4, 1, 10.0), (6, 2, 40.0)]:
        when.next(Clock(step=step, round=round, lr=1.0, loss=loss, round_lr=1.0), state)
    assert state["first"] == [20.0, 1.0]  # (4·10 + 2·40)/6


def scripted(losses: Callable[[int, int], float], expression: str, steps: int) -> list[list[int]]:
    """The rounds of two workers that observe such losses."""

    def worker(comm: offbeat.Communicator) -> list[int]:
        net = Slopes()
        opt = torch.optim.SGD(net.parameters(), lr=0.25)
        sync = offbeat.method(expression)(net, opt, group=comm)
        for step in range(steps):
            net(1.0).backward()
            sync.observe(losses(comm.rank, step))
            sync.step()
            opt.zero_grad()
        sync.finish()
        return [report.step for report in sync.reports]

    return offbeat.simulate(worker, 2)


def test_adacomm_end_to_end() -> None:
    # Mean losses 16 in the first four steps, then 4: τ = 4·√(4/16) = 2 after step 8, 1 after 12. By its own
    # losses, 20 and 7.9, rank 0 would take 3; by 12 and 0.1 rank 1 would take 1.
    def mean(rank: int, step: int) -> float:
        return (20.0, 12.0)[rank] if step < 4 else (7.9, 0.1)[rank]

    assert scripted(mean, "adacomm(start=4, interval=4)", 14) == [[4, 8, 10, 12, 13, 14]] * 2


def test_the_loss_of_a_round_is_the_mean_of_its_steps() -> None:
    """8·√(16/64) = 4 after step 16; 8·√(15.9/64) is not smaller, so 2 after step 24.

    Sums instead of means would be smaller by half, four steps to a round being fewer than the first eight.
    """

    def falling(rank: int, step: int) -> float:
        return (64.0, 16.0, 15.9, 1.0)[step // 8]

    (rounds, _) = scripted(falling, "adacomm(start=8, interval=8)", 28)
    assert rounds == [8, 16, 20, 24, 26, 28]


def test_losses_before_the_first_period_do_not_count() -> None:
    """1 000 in the synchronous steps 1 … 4; then F₀ = 16 and F = 4, so the period halves after step 12."""

    def late(rank: int, step: int) -> float:
        return 1000.0 if step < 4 else 16.0 if step < 8 else 4.0

    (rounds, _) = scripted(late, "post_local_sgd(switch=4, every=AdaComm(start=4, interval=4))", 16)
    assert rounds == [1, 2, 3, 4, 8, 12, 14, 16]
    # F₀ = (4·1 000 + 4·16)/8 = 508 would have given 4·√(4/508), that is 1.


@pytest.mark.parametrize("steps", [4, 5, 8])
def test_finish_lands_a_round_that_has_no_losses_of_its_own(steps: int) -> None:
    (rounds, _) = scripted(
        lambda rank, step: 1.0, "local_sgd(every=AdaComm(start=4, interval=4), delay='round')", steps
    )
    assert rounds == [4, 8][: steps // 4]


# All workers decide alike.


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "expression",
    [
        "adaptive(start=2, sample=5)",
        "adacomm(start=6, interval=6)",
        "noloco(every=Adaptive(start=2, sample=5))",
        "noloco(every=AdaComm(start=6, interval=6))",
        "eager_diloco(every=Adaptive(start=2, sample=5))",
        "local_sgd(every=Adaptive(start=2, sample=5), delay=1)",
        "palsgd(every=Adaptive(start=2, sample=5), p=0.3)",
    ],
)
def test_wildly_different_data_keeps_all_periods_equal(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        torch.manual_seed(comm.rank)
        net = torch.nn.Linear(3, 1).double()
        opt = torch.optim.SGD(net.parameters(), lr=1e-3)
        sync = offbeat.method(expression)(net, opt, group=comm)
        for step in range(40):
            scale = 50.0 if comm.rank == 3 and step % 7 < 3 else 0.1
            loss = (net(scale * torch.randn(4, 3).double()) - comm.rank).square().mean()
            loss.backward()
            sync.observe(loss)
            sync.step()
            opt.zero_grad()
        sync.finish()
        return [report.step for report in sync.reports]

    first, *others = offbeat.simulate(worker, 4)
    assert all(rounds == first for rounds in others)
    assert len({after - before for before, after in itertools.pairwise(first)}) > 1


def test_the_drift_of_gossip_is_told_to_everyone_only_if_it_decides() -> None:
    """With a fixed period nobody waits for all: each pair knows its own drift."""

    def worker(comm: offbeat.Communicator, every: str) -> float | None:
        walk = Walk(comm, f"noloco(every={every}, seed=1)")
        walk.go(2)
        return walk.sync.reports[0].drift

    # After two steps −2, −6 | −10: the pair has drift 4, who is alone 0; the mean over all is 8/3.
    assert offbeat.simulate(lambda comm: worker(comm, "2"), 3) == [4, 4, 0]
    told = offbeat.simulate(lambda comm: worker(comm, "Adaptive(start=2, sample=5)"), 3)
    assert told == pytest.approx([8 / 3] * 3)


# Bad input.


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("adaptive(start=4)", "method('adaptive(start=4)'): adaptive needs sample=."),
        ("adaptive()", "method('adaptive()'): adaptive needs sample=."),
        ("adacomm(start=4)", "method('adacomm(start=4)'): adacomm needs interval=."),
        (
            "local_sgd(every=Adaptive(start=4))",
            "method('local_sgd(every=Adaptive(start=4))'): Adaptive needs sample=.",
        ),
        (
            "adaptive(sample=0)",
            "Adaptive(start=4, sample=0, warmup=0): sample must be at least 1.",
        ),
        (
            "adaptive(sample=5, warmup=5)",
            "Adaptive(start=4, sample=5, warmup=5): warmup must be below sample.",
        ),
        ("adaptive(start=0, sample=5)", "Adaptive(start=0, sample=5, warmup=0): start must be at least 1."),
        ("adacomm(start=0, interval=5)", "AdaComm(start=0, interval=5, warmup=0): start must be at least 1."),
        (
            "adacomm(start=4, interval=0)",
            "AdaComm(start=4, interval=0, warmup=0): interval must be at least 1.",
        ),
        (
            "adacomm(start=4, interval=5, warmup=-1)",
            "AdaComm(start=4, interval=5, warmup=-1): warmup must not be negative.",
        ),
    ],
)
def test_bad_numbers(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Walk(offbeat.Solo(), expression)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (
            "adaptive(sample=5, drift=False)",
            "drift=False with Adaptive(start=4, sample=5, warmup=0), which needs the measurements of rounds: "
            "leave drift out.",
        ),
        (
            "adacomm(start=4, interval=5, drift=False)",
            "drift=False with AdaComm(start=4, interval=5, warmup=0), which needs the measurements of "
            "rounds: leave drift out.",
        ),
    ],
)
def test_what_decides_must_be_measured(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Walk(offbeat.Solo(), expression)


def test_adaptive_without_sample() -> None:
    net = Slopes()
    sentence = "adaptive needs sample=."
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        offbeat.adaptive(net, torch.optim.SGD(net.parameters(), lr=0.1), start=4)


@pytest.mark.parametrize("expression", ["adacomm(start=2, interval=3)", "diloco(every=AdaComm(2, 3))"])
def test_adacomm_without_observe(expression: str) -> None:
    sentence = (
        "AdaComm(start=2, interval=3, warmup=0) needs the loss: call sync.observe(loss) before sync.step()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        walked(expression, 4)


def test_gradients_may_be_exchanged_by_the_loss() -> None:
    """Where drift is not measured by itself, it is when the schedule wants to know."""

    def worker(comm: offbeat.Communicator) -> list[int]:
        net = Slopes()
        opt = torch.optim.SGD(net.parameters(), lr=0.25)
        exchange = offbeat.Exchange(offbeat.grads(net), when=AdaComm(start=4, interval=4), among=comm)
        sync = offbeat.Synchronizer(opt, [exchange])
        for step in range(10):
            net(1.0).backward()
            sync.observe(16.0 if step < 4 else 4.0)
            sync.step()
            opt.zero_grad()
        return [report.step for report in sync.reports]

    assert offbeat.simulate(worker, 2) == [[4, 8, 10]] * 2
