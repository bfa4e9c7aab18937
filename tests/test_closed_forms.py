"""Trajectories worked out by hand: laws cannot catch two methods wrong in the same way.

One parameter x, at 0 on all workers. The loss is linear, so the gradient is a constant: a step of SGD with lr
1 adds d to x, where d is 1 on rank 0 and 3 on rank 1 (and, with four workers, 5 on rank 2 and 7 on rank 3).
All numbers are sums of few powers of two, hence exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offbeat
from offbeat import Correct, Every, Exchange, Rebase, Replace, Synchronizer, Update, params

Build = Callable[[nn.Module, torch.optim.Optimizer, offbeat.Communicator], Synchronizer]


class Transport(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))


def walk(build: Build, steps: int, workers: int = 2) -> list[list[float]]:
    """x on each rank after every step, and after finish()."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        model = Transport()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = build(model, optimizer, comm)
        trace = []
        for _ in range(steps):
            (-(2 * comm.rank + 1) * model.x.sum()).backward()
            sync.step()
            optimizer.zero_grad()
            trace.append(model.x.item())
        sync.finish()
        return [*trace, model.x.item()]

    return offbeat.simulate(worker, workers)


def exchange(every: int, update: Update, delay: int | str = 0) -> Build:
    return lambda model, optimizer, comm: Synchronizer(
        optimizer, [Exchange(params(model), when=Every(every), among=comm, update=update, delay=delay)]
    )


def named(expression: str) -> Build:
    return lambda model, optimizer, comm: offbeat.method(expression)(model, optimizer, group=comm)


def test_replace() -> None:
    # Alone: 1, 2 and 3, 6. After step 2 the mean 4. Then 5, 6 and 7, 10: the mean 8. Step 5 adds d; the end
    # is the mean of 9 and 11.
    assert walk(exchange(2, Replace()), 5) == [[1, 4, 5, 8, 9, 10], [3, 4, 7, 8, 11, 10]]


def test_replace_keeping_a_quarter() -> None:
    # Step 2: x = 2 and 6, mean 4: ¼·2 + ¾·4 = 3.5 and ¼·6 + ¾·4 = 4.5.
    # Step 4: x = 5.5 and 10.5, mean 8: ¼·5.5 + ¾·8 = 7.375 and ¼·10.5 + ¾·8 = 8.625. The end: their mean.
    expected = [[1, 3.5, 4.5, 7.375, 8], [3, 4.5, 7.5, 8.625, 8]]
    assert walk(exchange(2, Replace(keep=0.25)), 4) == expected


def test_correct_without_delay_is_replace() -> None:
    assert walk(exchange(2, Correct()), 5) == walk(exchange(2, Replace()), 5)


def test_correct_by_a_half() -> None:
    # Step 2: x = 2 and 6, mean 4: 2 + ½(4 − 2) = 3 and 6 + ½(4 − 6) = 5.
    # Step 4: x = 5 and 11, mean 8: 5 + ½·3 = 6.5 and 11 − ½·3 = 9.5.
    assert walk(exchange(2, Correct(gain=0.5)), 4) == [[1, 3, 4, 6.5, 8], [3, 5, 8, 9.5, 8]]


def test_replace_one_step_late() -> None:
    # Sent after step 2: 2 and 6, mean 4. Lands after step 3, where x = 3 and 9: both become 4, losing a step.
    # Sent after step 4: 5 and 7, mean 6. Lands after step 5 (x = 6 and 10): 6. Step 6: 7 and 9 are sent, mean
    # 8; it lands in finish(): 8 and 8.
    expected = [[1, 2, 4, 5, 6, 7, 8], [3, 6, 4, 7, 6, 9, 8]]
    assert walk(exchange(2, Replace(), delay=1), 6) == expected


def test_replace_late_keeping_half() -> None:
    # DaSGD. Sent after step 2: mean 4. After step 3 x = 3 and 9: ½·3 + ½·4 = 3.5 and ½·9 + ½·4 = 6.5.
    # Sent after step 4: 4.5 and 9.5, mean 7. After step 5 x = 5.5 and 12.5: 6.25 and 9.75. Nothing is in
    # flight at the end: the mean of 6.25 and 9.75.
    expected = [[1, 2, 3.5, 4.5, 6.25, 8], [3, 6, 6.5, 9.5, 9.75, 8]]
    assert walk(exchange(2, Replace(keep=0.5), delay=1), 5) == expected


def test_correct_one_step_late() -> None:
    # Sent after step 2: 2 and 6, mean 4: the correction +2, −2 lands after step 3: 3 + 2 = 5 and 9 − 2 = 7.
    # Sent after step 4: 6 and 10, mean 8: +2, −2 after step 5: 7 + 2 = 9 and 13 − 2 = 11. The end: mean 10.
    assert walk(named("cocod(every=2, delay=1)"), 5) == [[1, 2, 5, 6, 9, 10], [3, 6, 7, 10, 11, 10]]


def test_correct_two_steps_late() -> None:
    # Every 3. Sent after step 3: 3 and 9, mean 6: +3, −3. After step 5 x = 5 + 3 = 8 and 15 − 3 = 12.
    # Sent after step 6: 9 and 15, mean 12: +3, −3. After step 8: 11 + 3 = 14 and 21 − 3 = 18.
    expected = [[1, 2, 3, 4, 8, 9, 10, 14, 16], [3, 6, 9, 12, 12, 15, 18, 18, 16]]
    assert walk(named("local_sgd(every=3, delay=2, gain=1.0)"), 8) == expected


def test_correct_by_a_half_and_late() -> None:
    # As above, but the correction of step 3 is ±1.5: after step 5 x = 6.5 and 13.5. Step 6: 7.5 and 16.5 are
    # sent, mean 12: ½·(12 − 7.5) = 2.25 lands in finish(), after step 7 where x = 8.5 and 19.5: 10.75 and
    # 17.25, which are then averaged: 14.
    expected = [[1, 2, 3, 4, 6.5, 7.5, 8.5, 14], [3, 6, 9, 12, 13.5, 16.5, 19.5, 14]]
    assert walk(exchange(3, Correct(gain=0.5), delay=2), 7) == expected
    method = "local_sgd(every=3, delay=2, gain=0.5{})"
    assert walk(named(method.format("")), 7) == expected
    assert walk(named(method.format(", reduce=RandomBlock(1, least=1)")), 7) == expected


def test_by_default_a_late_mean_corrects_by_a_quarter() -> None:
    # The correction of step 3 is ¼·3: after step 5 x = 5.75 and 14.25. Step 6 sends 6.75 and 17.25, mean 12,
    # which lands in finish().
    expected = [[1, 2, 3, 4, 5.75, 6.75, 7.75, 14], [3, 6, 9, 12, 14.25, 17.25, 20.25, 14]]
    assert walk(named("local_sgd(every=3, delay=2)"), 7) == expected
    assert walk(named("local_sgd(every=3, delay=2, reduce=RandomBlock(1, least=1))"), 7) == expected


def roll(
    method: str, curvature: float, push: Callable[[int, int], float], steps: int, momentum: float = 0.0
) -> list[list[float]]:
    """Two workers on ½·curvature·x², each pushed by push(rank, step): x ← (1 − curvature)·x + push."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        model = Transport()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
        sync = named(method)(model, optimizer, comm)
        trace = []
        for step in range(steps):
            (curvature / 2 * model.x**2 - push(comm.rank, step) * model.x).sum().backward()
            sync.step()
            optimizer.zero_grad()
            trace.append(model.x.item())
        return trace

    return offbeat.simulate(worker, 2)


def test_correct_by_a_half_on_a_parabola() -> None:
    # x ← ½x on rank 0, ½x + 8 on rank 1. After step 2: 0 and 12, sent, mean 6. After step 3: 0 and 14, then
    # ½·6 more and less: 3 and 11. After step 4: 1.5 and 13.5, mean 7.5. After step 5: 0.75 and 14.75, then
    # ½·6 more and less. The mean is that of workers that never meet: 4, 6, 7, 7.5, 7.75.
    expected = [[0, 0, 3, 1.5, 3.75], [8, 12, 11, 13.5, 11.75]]
    assert roll("local_sgd(every=2, delay=1, gain=0.5)", 0.5, lambda rank, step: 8.0 * rank, 5) == expected


@pytest.mark.parametrize("gain", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("c", [1.0, 0.5, 0.0, -0.5])
def test_a_late_correction_leaves_c_minus_gain_of_a_difference(c: float, gain: float) -> None:
    # The first step puts the workers at 16 and −16, and each later one multiplies by c. After step 2 they
    # send 16c. After step 3 they are at 16c², then at 16c² − gain·16c = 16c(c − gain). After step 4 they
    # send c times that: from one message to the next the difference shrinks to c(c − gain).
    first, second = roll(
        f"local_sgd(every=2, delay=1, gain={gain})",
        1 - c,
        lambda rank, step: 16.0 * (1 - 2 * rank) * (step == 0),
        8,
    )
    sent = [16 * c * (c * (c - gain)) ** i for i in range(4)]
    assert first[1::2] == sent
    assert first[2::2] == [x * (c - gain) for x in sent[:3]]
    assert second == [-x for x in first]  # the mean stays where it is


def test_with_momentum_the_default_is_stable_where_a_whole_correction_is_not() -> None:
    # A round maps (x, velocity) of the difference: x_sent is subtracted gain times, three of four steps late.
    # With momentum 0.9 and curvature 0.35 its largest eigenvalue is 1.417 with a gain of 1, 0.816 with 1/4:
    # the differences of the first step grow a million times in 40 rounds, or vanish.
    def first_push(rank: int, step: int) -> float:
        return (1.0 - 2 * rank) * (step == 0)

    def difference(method: str) -> float:
        first, _ = roll(method, 0.35, first_push, 160, momentum=0.9)
        return max(abs(x) for x in first[-4:])

    assert 1e5 < difference("cocod(every=4, delay=3)") < 1e8
    assert difference("local_sgd(every=4, delay=3)") < 1e-2


@pytest.mark.parametrize(("gain", "limit"), [(1.0, 0.25), (0.5, 0.40), (0.25, 1.89)])
def test_the_curvature_from_which_differences_grow(gain: float, limit: float) -> None:
    """As docs/concepts.md says, for momentum 0.9, every=4 and delay=3. The state: x, velocity, x as sent."""

    def largest_eigenvalue(curvature: float) -> float:
        step = torch.tensor([[1 - curvature, -0.9, 0], [curvature, 0.9, 0], [0, 0, 1]]).double()
        send = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 0]]).double()
        land = torch.tensor([[1, 0, -gain], [0, 1, 0], [0, 0, 0]]).double()
        return torch.linalg.eigvals(step @ land @ step.matrix_power(3) @ send).abs().max().item()

    assert largest_eigenvalue(limit - 0.01) < 1 < largest_eigenvalue(limit + 0.01)


@pytest.mark.parametrize("delay", [2, "round"])
def test_a_delay_of_the_whole_period(delay: int | str) -> None:
    # What was sent after step 2 lands after step 4, and only then the next is sent.
    # Step 2 sends 2 and 6 (mean 4: ±2). Step 4: x = 4 + 2 = 6 and 12 − 2 = 10; these are sent (mean 8: ±2).
    # Step 6: x = 8 + 2 = 10 and 16 − 2 = 14, sent (mean 12: ±2). finish() after step 7: 11 + 2 = 13 and
    # 17 − 2 = 15, then their mean 14.
    expected = [[1, 2, 3, 6, 7, 10, 11, 14], [3, 6, 9, 10, 13, 14, 17, 14]]
    assert walk(exchange(2, Correct(), delay=delay), 7) == expected


def test_replace_delayed_to_the_next_round() -> None:
    # Step 2 sends mean 4. Step 4: x = 4 and 12 become 4 and 4, and 4 is sent. Step 6: 6 and 10 become 4.
    # The mean 4 of step 6 lands in finish().
    expected = [[1, 2, 3, 4, 5, 4, 5, 4], [3, 6, 9, 4, 7, 4, 7, 4]]
    assert walk(exchange(2, Replace(), delay="round"), 7) == expected


def test_hierarchical() -> None:
    # Four workers, d = 1, 3, 5, 7, nodes {0, 1} and {2, 3}. Inside a node after every step (means 2 and 6),
    # among all after every third. Step 1: 2, 6. Step 2: 4, 12. Step 3, global: the mean of 5, 7, 17, 19,
    # which is 12. Step 4: 14, 18. Step 5: 16, 24, and the end is their mean 20.
    low, high = [2, 4, 12, 14, 16, 20], [6, 12, 12, 18, 24, 20]
    assert walk(named("hierarchical(nodes=2, inner=1, outer=3)"), 5, workers=4) == [low, low, high, high]


def test_hierarchical_with_a_longer_inner_period() -> None:
    # Nodes {0, 2} and {1, 3}, d = 1, 5 and 3, 7; inside every 2, among all every 4.
    # Step 1: 1, 3, 5, 7. Step 2: 2, 6, 10, 14 → 6, 10, 6, 10. Step 3: 7, 13, 11, 17.
    # Step 4: 8, 16, 16, 24, global only: 16.
    walks = walk(named("hierarchical(nodes=((0, 2), (1, 3)), inner=2, outer=4)"), 4, workers=4)
    assert walks == [[1, 6, 7, 16, 16], [3, 10, 13, 16, 16], [5, 6, 11, 16, 16], [7, 10, 17, 16, 16]]


def test_lookahead_inside_diloco() -> None:
    # Slow weights φ of rate 1/2 after steps 2, 4, 6, 8; outer rounds of rate 1/2 and momentum 1/2 after 4, 8.
    # Rank 0: x = 1, 2, so φ = 1; x = 2, 3, so φ = 2. Rank 1: x = 3, 6, so φ = 3; x = 6, 9, so φ = 6.
    # Round 1: Δ = mean(0 − 2, 0 − 6) = −4, the velocity −4, the step 1/2·(4 + 2) = 3: a = x = φ = 3.
    # Rank 0: x = 4, 5, so φ = 4; x = 5, 6, so φ = 5. Rank 1: x = 6, 9, so φ = 6; x = 9, 12, so φ = 9.
    # Round 2: Δ = mean(3 − 5, 3 − 9) = −4, the velocity −6, the step 1/2·(4 + 3) = 3.5: a = 6.5.
    # Step 9 adds d; the end is the mean of 7.5 and 9.5.
    method = named("lookahead_diloco(every=4, inner=2, alpha=0.5, lr=0.5, momentum=0.5, ramp=0)")
    assert walk(method, 9) == [[1, 1, 2, 3, 4, 4, 5, 6.5, 7.5, 8.5], [3, 3, 6, 3, 6, 6, 9, 6.5, 9.5, 8.5]]


def test_an_anchor_of_few_workers_follows_a_landing_of_more() -> None:
    # Pairs step their anchor by half of their mean displacement after steps 1 and 3; all average after 2.
    # Step 1: x = 1, 3, 5, 7. Pairs: 2 and 6, halved: 1 and 3. Step 2: 2, 4, 8, 10, the mean 6, and both
    # anchors with it. Step 3: 7, 9, 11, 13. Pairs: 6 + 1/2·2 = 7 and 6 + 1/2·6 = 9. The end is their mean.
    def build(model: nn.Module, optimizer: torch.optim.Optimizer, comm: offbeat.Communicator) -> Synchronizer:
        pairs = Exchange(
            params(model),
            when=Every(2, offset=1),
            among=offbeat.Subgroups(2, comm),
            update=offbeat.Outer(offbeat.SGD(0.5)),
        )
        return Synchronizer(optimizer, [pairs, Exchange(params(model), when=Every(2), among=comm)])

    first, second = [1, 6, 7, 8], [3, 6, 9, 8]
    assert walk(build, 3, workers=4) == [first, first, second, second]


def test_post_local_across_the_switch() -> None:
    # Three steps with the mean gradient 2: 2, 4, 6 on both. Then alone, averaged at 3 + 2 = 5:
    # 7 and 9, then 8 and 12 → 10. Step 6: 11 and 13; step 7: 12 and 16 → 14. Step 8: 15 and 17, the end 16.
    expected = [[2, 4, 6, 7, 10, 11, 14, 15, 16], [2, 4, 6, 9, 10, 13, 14, 17, 16]]
    assert walk(named("post_local_sgd(switch=3, every=2)"), 8) == expected


def test_ddp() -> None:
    assert walk(named("ddp()"), 3) == [[2, 4, 6, 6]] * 2


def test_qsr() -> None:
    # alpha 2, lr 1: the period is 4. Step 4: 4 and 12 → 8. With total 6, the last round comes after step 6:
    # 10 and 14 → 12.
    expected = [[1, 2, 3, 8, 9, 12, 12], [3, 6, 9, 8, 11, 12, 12]]
    assert walk(named("qsr(alpha=2.0, base=1, total=6)"), 6) == expected


def test_snoo() -> None:
    # The mean gradient adds 2 a step. Step 2: x = 4, a − x = −4 = b, a = ½(4 + ½·4) = 3. Step 4: x = 7,
    # a − x = −4, b = ½·(−4) − 4 = −6, a = 3 + ½(4 + ½·6) = 6.5.
    expected = [2, 3, 5, 6.5, 8.5, 8.5]
    assert walk(named("snoo(every=2, lr=0.5, momentum=0.5, ramp=0)"), 5) == [expected, expected]


def test_two_exchanges_of_one_model() -> None:
    """Fragments are exchanges in a list: each of its own tensors, at its own times."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def worker(comm: offbeat.Communicator) -> list[tuple[float, float]]:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parts = [
            Exchange(params(model, only=["a"]), when=Every(2), among=comm),
            Exchange(params(model, only=["b"]), when=Every(2, offset=1), among=comm),
        ]
        trace = []
        with Synchronizer(optimizer, parts) as sync:
            for _ in range(4):
                (-(2 * comm.rank + 1) * (model.a + model.b).sum()).backward()
                sync.step()
                optimizer.zero_grad()
                trace.append((model.a.item(), model.b.item()))
        return [*trace, (model.a.item(), model.b.item())]

    # a after 2 and 4: 1, 4, 5, 8 and 3, 4, 7, 8. b after 1 and 3: 2, 3, 6, 7 and 2, 5, 6, 9; the end 8.
    assert offbeat.simulate(worker, 2) == [
        [(1, 2), (4, 3), (5, 6), (8, 7), (8, 8)],
        [(3, 2), (4, 5), (7, 6), (8, 9), (8, 8)],
    ]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Replace(keep=1.0), "Replace(keep=1.0): keep must be at least 0 and below 1."),
        (lambda: Replace(keep=-0.1), "Replace(keep=-0.1): keep must be at least 0 and below 1."),
        (lambda: Correct(gain=0.0), "Correct(gain=0.0): gain must be above 0 and at most 1."),
        (lambda: Correct(gain=1.5), "Correct(gain=1.5): gain must be above 0 and at most 1."),
        (lambda: Rebase(gain=0.0), "Rebase(gain=0.0): gain must be above 0 and at most 1."),
        (lambda: Rebase(gain=1.5), "Rebase(gain=1.5): gain must be above 0 and at most 1."),
    ],
)
def test_sentences(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        make()
    assert str(caught.value) == sentence
