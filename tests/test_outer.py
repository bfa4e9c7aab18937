"""Outer steps on an anchor: DiLoCo, SlowMo, NoLoCo, any optimizer of torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from problems import Dyadic, data, same, snapshot
from slopes import Slopes, Walk, composed, walked
from torch import Tensor, nn

import offbeat
from offbeat.base.draws import draw_order

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


# Closed forms, worked out by hand.


def test_diloco_is_torchs_nesterov() -> None:
    # Slopes 1 and 3, two steps of lr 1 to a round: displacements 2 and 6, Δ = 4. Outer lr 0.5, momentum 0.5.
    # round 1: b = 4                d = 4 + 0.5·4 = 6      a =  0   − 0.5·6   = −3
    # round 2: b = 0.5·4 + 4 = 6    d = 4 + 0.5·6 = 7      a = −3   − 0.5·7   = −6.5
    # round 3: b = 0.5·6 + 4 = 7    d = 4 + 0.5·7 = 7.5    a = −6.5 − 0.5·7.5 = −10.25
    first, second = walked("diloco(every=2, lr=0.5, momentum=0.5, ramp=0)", 6)
    assert first == [-1, -3, -4, -6.5, -7.5, -10.25, -10.25]
    assert second == [-3, -3, -6, -6.5, -9.5, -10.25, -10.25]


def test_the_defaults_of_diloco() -> None:
    # 64 steps of lr 1/64: Δ = 2. b = 2; the momentum is 1/41: d = 2 + 2/41, a = −0.7·d.
    first, second = walked("diloco", 64, lr=1 / 64)
    assert first[-2] == second[-2] == pytest.approx(-0.7 * 84 / 41, rel=1e-14)
    assert first[-3] == -63 / 64
    # The paper's: d = 2 + 0.9·2 = 3.8, a = −0.7·3.8 = −2.66.
    assert walked("diloco(ramp=0)", 64, lr=1 / 64)[0][-2] == pytest.approx(-2.66, rel=1e-14)


def test_momentum_grows_over_the_rounds() -> None:
    # Δ = 4 in every round; outer lr 0.5. Momenta: 1/(1 + 3), 2/(2 + 3), 3/(3 + 3), and 0.5 from then on.
    # Nesterov: b = 4                   d = 4 + 4/4 = 5          a = −2.5
    #           b = 0.4·4 + 4 = 5.6     d = 4 + 0.4·5.6 = 6.24   a = −2.5 − 3.12 = −5.62
    #           b = 0.5·5.6 + 4 = 6.8   d = 4 + 3.4 = 7.4        a = −5.62 − 3.7 = −9.32
    #           b = 0.5·6.8 + 4 = 7.4   d = 4 + 3.7 = 7.7        a = −9.32 − 3.85 = −13.17
    expected = {"diloco": [-2.5, -5.62, -9.32, -13.17]}
    # Without Nesterov the anchor moves by b/2.
    expected["slowmo"] = expected["noloco"] = [-2, -4.8, -8.2, -11.9]
    for name, anchors in expected.items():
        for trace in walked(f"{name}(every=2, lr=0.5, momentum=0.5, ramp=3)", 8):
            assert trace[1:8:2] == pytest.approx(anchors, rel=1e-14), name


def test_the_ramp_of_slowmo_where_the_rate_is_0() -> None:
    # β = 1/4, 2/5, 3/6. γ = 1: v = 2, a = −2;   γ = 0: v = 0.4·2 = 0.8, a stays;
    # γ = 1: r = 1, v = 0.5·0.8 + 2 = 2.4, a = −4.4
    first, _ = walked("slowmo(every=1, momentum=0.9, ramp=3)", 3, lr=lambda step: [[1, 0, 1][step]])
    assert first[:3] == pytest.approx([-2, -2, -4.4], rel=1e-14)


def test_the_ramp_counts_rounds_after_the_warm_up() -> None:
    # Two steps of the mean gradient 2, then rounds of Δ = 2 with momentum 1/2 and 0.625.
    # a = −4;  b = 2, a = −4 − (2 + 1) = −7;  b = 0.625·2 + 2 = 3.25, a = −7 − (2 + 2.03125) = −11.03125
    for trace in walked("diloco(every=1, lr=1.0, momentum=0.625, ramp=1, warmup=2)", 4):
        assert trace[:4] == [-2, -4, -7, -11.03125]


def test_slowmo_at_a_constant_rate() -> None:
    # Δ = 4 in every round; α = β = 0.5.
    # v = 4, a = −2;    v = 0.5·4 + 4 = 6, a = −2 − 3 = −5;    v = 0.5·6 + 4 = 7, a = −5 − 3.5 = −8.5
    first, second = walked("slowmo(every=2, lr=0.5, momentum=0.5, ramp=0)", 6)
    assert first == [-1, -2, -3, -5, -6, -8.5, -8.5]
    assert second == [-3, -2, -5, -5, -8, -8.5, -8.5]


def test_slowmo_when_the_rate_halves_and_vanishes() -> None:
    # Slopes 1 and 3, so Δ = 2·(the sum of the period's rates); α = 1, β = 0.5.
    # rates 1, 1:      r = 1 (first)   v = 4                        a = −4
    # rates 0.5, 0.5:  r = 0.5         v = 0.5·0.5·4 + 2 = 3        a = −4 − 3 = −7
    # rates 1, 0:      γ = 0           v = 0.5·3 = 1.5              a = −7 − 2 = −9
    # rates 1, 1:      r = 1/0.5 = 2   v = 0.5·2·1.5 + 4 = 5.5      a = −9 − 5.5 = −14.5
    rates = [1, 1, 0.5, 0.5, 1, 0, 1, 1]
    first, second = walked("slowmo(every=2, momentum=0.5, ramp=0)", 8, lr=lambda step: [rates[step]])
    assert first[1::2] == second[1::2] == [-4, -7, -9, -14.5]


def test_slowmo_caps_a_tenfold_jump_of_the_rate() -> None:
    # γ from 1/64 to 1: r = 10, not 64. v = Δ = 2/64; then v = 0.5·10·(1/32) + 2, a = −1/32 − v.
    rates = [1 / 64, 1]
    first, _ = walked("slowmo(every=1, momentum=0.5, ramp=0)", 2, lr=lambda step: [rates[step]])
    assert first[1] == -1 / 32 - (5 / 32 + 2)
    # From 1/8 to 1: r = 8 stays. v = 2/8; then v = 0.5·8·0.25 + 2 = 3.
    rates = [1 / 8, 1]
    first, _ = walked("slowmo(every=1, momentum=0.5, ramp=0)", 2, lr=lambda step: [rates[step]])
    assert first[1] == -1 / 4 - 3


def papers_slowmo(rates: Sequence[float], every: int, alpha: float, beta: float) -> list[float]:
    """u ← βu + (a − mean x)/γ, a ← a − αγu, on slopes 1 and 3; a round with γ = 0 leaves γu out."""
    a = u = 0.0
    anchors = []
    for start in range(0, len(rates), every):
        gone, gamma = 2 * sum(rates[start : start + every]), rates[start + every - 1]
        u = beta * u + (gone / gamma if gamma else 0.0)
        a -= alpha * gamma * u if gamma else alpha * gone
        anchors.append(a)
    return anchors


@pytest.mark.parametrize(
    "rate",
    [
        lambda step: 0.97**step,
        lambda step: min(step, 10) / 10,  # a warm-up from 0
        lambda step: (30 - step) / 30,
        lambda step: 0.0 if step % 9 in (1, 2) else 1.0 + step % 4,  # 0 at the first round, and later on
        lambda step: 0.0 if step < 9 or step > 20 else 0.5,  # whole periods of 0 at both ends
    ],
)
def test_slowmo_is_the_papers_form(rate: Callable[[int], float]) -> None:
    """Also for groups with rates of their own."""

    def worker(comm: offbeat.Communicator) -> list[list[float]]:
        walk = Walk(comm, "slowmo(every=3, lr=0.8, momentum=0.6, ramp=0)", lr=both, layers=2)
        trace = []
        for _ in range(10):
            walk.go(3)
            trace.append(walk.net.weights)
        return trace

    def both(step: int) -> list[float]:
        return [rate(step), rate(29 - step)]

    for trace in offbeat.simulate(worker, 2):
        for i in range(2):
            expected = papers_slowmo([both(step)[i] for step in range(30)], 3, 0.8, 0.6)
            assert [row[i] for row in trace] == pytest.approx(expected, rel=1e-12)


def test_noloco_of_two() -> None:
    # x − φ = −2 and −6 in every round of two steps; μ = b = 0.5, and φ stays the same on both.
    # m = 0.5·(−4) = −2, φ = −2;   m = 0.5·(−2) + 0.5·(−4) = −3, φ = −5;   m = −1.5 − 2 = −3.5, φ = −8.5
    first, second = walked("noloco(every=2, lr=0.5, momentum=0.5, ramp=0)", 6)
    assert first == [-1, -2, -3, -5, -6, -8.5, -8.5]
    assert second == [-3, -2, -5, -5, -8, -8.5, -8.5]


def test_noloco_of_three_leaves_one_alone() -> None:
    # Seed 1 pairs (0, 1), then (1, 2), then (0, 2). x − φ = −2, −6, −10 in a round of two steps; μ = b = 0.5.
    # round 1: x = −2, −6 | −10        mean −4 | −10
    #          m = −2, −2, −5          φ = −2, −2, −5
    # round 2: x = −4 | −8, −15        mean −4 | −11.5
    #          m = −1 + 0.5·(−4 + 2) = −2,  −1 + 0.5·(−11.5 + 2) = −5.75,  −2.5 + 0.5·(−11.5 + 5) = −5.75
    #          φ = −4, −7.75, −10.75
    # round 3: x = −6, −20.75 | −13.75        mean −13.375 | −13.75
    #          m = −1 + 0.5·(−13.375 + 4) = −5.6875,  −2.875 + 0.5·(−13.75 + 7.75) = −5.875,
    #              −2.875 + 0.5·(−13.375 + 10.75) = −4.1875
    #          φ = −9.6875, −13.625, −14.9375, whose mean is −12.75
    assert [draw_order(3, 1, round, "pairs")[2] for round in range(3)] == [2, 0, 1]
    traces = walked("noloco(every=2, lr=0.5, momentum=0.5, ramp=0, seed=1)", 6, workers=3)
    assert [trace[1] for trace in traces] == [-2, -2, -5]
    assert [trace[3] for trace in traces] == [-4, -7.75, -10.75]
    assert [trace[5] for trace in traces] == [-9.6875, -13.625, -14.9375]
    assert [trace[6] for trace in traces] == pytest.approx([-12.75] * 3, rel=1e-15)


def test_noloco_is_the_papers_form() -> None:
    """m ← μm + b·mean(Δ) + b·(mean(φ) − φ), with Δ and φ averaged apart."""
    slopes = torch.tensor([1.0, 3.0, 5.0, 7.0]).double()
    phi, m = torch.zeros(4).double(), torch.zeros(4).double()
    expected = []
    for round in range(6):
        order = draw_order(4, 5, round, "pairs")
        partner = {order[i]: order[i ^ 1] for i in range(4)}
        other = torch.tensor([partner[rank] for rank in range(4)])
        delta = -3 * slopes
        m = 0.5 * m + 0.7 * (delta + delta[other]) / 2 + 0.7 * ((phi + phi[other]) / 2 - phi)
        phi = phi + m
        expected.append(phi)
    traces = walked("noloco(every=3, ramp=0, seed=5)", 18, workers=4)
    assert len(set(expected[1].tolist())) > 1
    for round, values in enumerate(expected):
        assert [trace[3 * round + 2] for trace in traces] == pytest.approx(values.tolist(), rel=1e-12)


def test_noloco_draws_by_its_seed() -> None:
    assert walked("noloco(every=2, seed=1)", 4, workers=3) != walked("noloco(every=2, seed=2)", 4, workers=3)


# Any optimizer as the outer one.

OPTIMIZERS = [
    ADAM,
    functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, dampening=0.25, weight_decay=0.125),
    torch.optim.Adagrad,
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: getattr(make, "func", make).__name__)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_any_optimizer_steps_the_anchor(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], device: str | None
) -> None:
    anchor = nn.Parameter(torch.zeros(1).double())
    by_hand = make([anchor])
    expected = []
    for round in range(5):
        anchor.grad = torch.tensor([2.0 * (1 + round % 3)]).double()  # two steps on slopes of mean 1 … 3
        by_hand.step()
        expected.append(anchor.item())

    def slope(rank: int, step: int) -> float:
        return 2.0 * rank * (1 + step // 2 % 3)

    method = composed(offbeat.Outer(make, device=device))
    for trace in walked(method, 10, slope=slope):
        assert trace[1::2] == pytest.approx([*expected], rel=1e-14)


@pytest.mark.few(2)
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: getattr(make, "func", make).__name__)
def test_any_outer_optimizer_resumes_exactly(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    method = composed(offbeat.Outer(make))

    def resumed(comm: offbeat.Communicator, at: int) -> list[float]:
        first = Walk(comm, method, lr=0.3)
        trace = first.go(at)
        second = Walk(comm, method, lr=0.3)
        second.steps = at
        second.net.load_state_dict(first.net.state_dict())
        second.sync.load_state_dict(first.sync.state_dict())
        return [*trace, *second.go(8 - at), second.finish()]

    whole = walked(method, 8, lr=0.3)
    for at in range(9):
        assert offbeat.simulate(lambda comm, at=at: resumed(comm, at), 2) == whole


def test_a_function_may_make_the_outer_optimizer() -> None:
    """Each worker's own function has an address of its own, which must not look like another method."""

    def worker(comm: offbeat.Communicator) -> tuple[float, str]:
        walk = Walk(comm, composed(offbeat.Outer(lambda tensors: torch.optim.SGD(tensors, lr=0.5))))
        return walk.go(2)[-1], repr(walk.sync)

    (first, method), (second, _) = offbeat.simulate(worker, 2)
    assert first == second == -2
    assert "<lambda>" in method
    assert " at 0x" not in method


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_the_anchor_may_live_on_another_device(keep: float) -> None:
    net = Slopes().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    update = offbeat.Outer(offbeat.SGD(lr=0.5), keep=keep, device="cpu")
    sync = composed(update, every=1)(net, opt, offbeat.Solo())
    net(1.0).backward()
    sync.step()
    assert net.weights == [-0.5 - 0.5 * keep]  # x = −1, a = −0.5
    assert sync.state_dict()["parts"][0]["states"]["update"]["anchor"][0].device.type == "cpu"
    with sync.averaged():
        assert net.weights == [-0.5]


# Consensus and the end.


@pytest.mark.parametrize(
    "expression",
    [
        "diloco(every=2, lr=0.5, momentum=0.5, ramp=0)",
        "slowmo(every=2, lr=0.5, momentum=0.5, ramp=0)",
        "palsgd(every=2, p=0.0, lr=0.5, momentum=0.5, ramp=0)",
        "streaming_diloco(every=2, fragments=2, delay=1, lr=0.5, momentum=0.5, ramp=0)",
    ],
)
def test_averaged_shows_the_anchor_and_sends_no_tensors(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> list[tuple[list[float], list[Tensor]]]:
        metered = offbeat.Metered(comm)
        walk = Walk(metered, expression, layers=2)
        seen = []
        for _ in range(7):
            walk.go()
            sent, live = metered.sent, walk.net.weights
            with walk.sync.averaged():
                shown = walk.net.weights
            assert metered.sent == sent + 128  # a header and the checksums
            assert walk.net.weights == live
            anchors = [walk.state(i)["anchor"] for i, part in enumerate(walk.sync.parts) if is_outer(part)]
            seen.append((shown, torch.cat([flat for flats in anchors for flat in flats]).tolist()))
        return seen

    first, second = offbeat.simulate(worker, 2)
    assert first == second
    assert all(shown == anchor for shown, anchor in first)
    assert len({tuple(shown) for shown, _ in first}) > 3


def is_outer(part: offbeat.Part) -> bool:
    return isinstance(part, offbeat.Exchange) and not part.live.early


class Buffered(Slopes):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.register_buffer("seen", torch.zeros(1))


def test_averaged_shows_the_anchor_and_the_mean_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slopes.Slopes", Buffered)

    def worker(comm: offbeat.Communicator) -> tuple[float, float]:
        walk = Walk(comm, "diloco(every=2, lr=0.5, momentum=0.5, ramp=0)")
        walk.go(3)
        walk.net.seen.fill_(comm.rank)
        with walk.sync.averaged():
            return walk.weight, walk.net.seen.item()

    assert offbeat.simulate(worker, 2) == [(-3, 0.5)] * 2


def test_averaged_shows_the_mean_of_anchors() -> None:
    """Of NoLoCo: φ = −2, −2, −5 after the first round, as worked out above; Eager: −1.5 and −4.5."""

    def worker(comm: offbeat.Communicator, expression: str) -> list[float]:
        walk = Walk(comm, expression)
        walk.go(3)
        return [walk.shown(), walk.shown(), walk.weight]

    three = offbeat.simulate(
        lambda comm: worker(comm, "noloco(every=2, lr=0.5, momentum=0.5, ramp=0, seed=1)"), 3
    )
    assert [shown for shown, _, _ in three] == pytest.approx([-3] * 3, rel=1e-15)
    assert [live for _, _, live in three] == [-3, -5, -10]
    two = offbeat.simulate(
        lambda comm: worker(comm, "eager_diloco(every=2, lr=0.5, momentum=0.5, ramp=0, share=1.0)"), 2
    )
    # D = 2 and 6, d = 2 + 1 and 6 + 3, a = −1.5 and −4.5.
    assert [shown for shown, _, _ in two] == [-3, -3]
    assert [live for _, _, live in two] == [-2.5, -7.5]


@pytest.mark.parametrize(
    "expression",
    ["diloco(every=2)", "slowmo(every=2)", "palsgd(every=2, p=0.0)", "noloco(every=2)"],
)
def test_finish_leaves_the_mean_of_the_live_weights(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float, float, list[float]]:
        walk = Walk(comm, expression)
        live = walk.go(3)[-1]
        end = walk.finish()
        return live, end, walk.state(0)["anchor"][0].tolist()

    (live, end, anchor), (other, also, follows) = offbeat.simulate(worker, 2)
    assert live != other
    assert end == also == pytest.approx((live + other) / 2, rel=1e-15)
    assert anchor == follows == [end]


@pytest.mark.parametrize("expression", ["diloco(every=2)", "slowmo(every=2)", "palsgd(every=2, p=0.0)"])
def test_finish_right_after_a_round_sends_no_weights(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[bool, int]:
        walk = Walk(comm, expression)
        before = walk.go(4)[-1]
        assert walk.rounds == [2, 4]
        sent = []
        metered = walk.sync._comm
        metered.mean = lambda tensors: sent.append(tensors)
        return walk.finish() == before, len(sent)

    assert offbeat.simulate(worker, 2) == [(True, 0)] * 2


# Composition.


def test_diloco_with_qsr() -> None:
    # lr 0.25 plans (0.5/0.25)² = 4 steps, Δ = 4·0.25·2 = 2;  0.125 plans 16 steps, Δ = 16·0.125·2 = 4.
    # b = 2, d = 3, a = −1.5;    b = 1 + 4 = 5, d = 4 + 2.5 = 6.5, a = −1.5 − 3.25 = −4.75
    def worker(comm: offbeat.Communicator) -> tuple[list[int], float, float]:
        walk = Walk(
            comm,
            "diloco(every=QSR(alpha=0.5, base=2), lr=0.5, momentum=0.5, ramp=0)",
            lr=lambda step: [0.25 if step < 4 else 0.125],
        )
        trace = walk.go(20)
        return walk.rounds, trace[3], trace[19]

    assert offbeat.simulate(worker, 2) == [([4, 20], -1.5, -4.75)] * 2


def test_slowmo_with_adaptive() -> None:
    # Slopes 1 ± d: the drift of a period of H steps is (H·d)². d = 1 for four steps: C = 4 from the round at
    # 2, and the one at 4 is as expected. d = 0: the period grows after the rounds at 6 and 9. d = 8: it
    # shrinks after 13, 16, 18 and stays 1.
    def slope(rank: int, step: int) -> float:
        return 1 + (2 * rank - 1) * (1.0 if step < 4 else 0.0 if step < 9 else 8.0)

    def worker(comm: offbeat.Communicator) -> list[int]:
        walk = Walk(comm, "slowmo(every=Adaptive(start=2, sample=3))", slope=slope)
        walk.go(20)
        return walk.rounds

    assert offbeat.simulate(worker, 2) == [[2, 4, 6, 9, 13, 16, 18, 19, 20]] * 2


def test_hierarchical_with_an_outer_step() -> None:
    # Nodes of slopes 1, 3 and 5, 7: each step ends at −2 and −6 from where it began; two of them: Δ = 8.
    # b = 8, a = −4;    b = 4 + 8 = 12, a = −10;    b = 6 + 8 = 14, a = −17
    expression = "hierarchical(nodes=2, inner=1, outer=2, update=Outer(SGD(lr=0.5, momentum=0.5)))"
    traces = walked(expression, 6, workers=4)
    assert traces[0][:6] == traces[1][:6] == [-2, -4, -6, -10, -12, -17]
    assert traces[2][:6] == traces[3][:6] == [-6, -4, -10, -10, -16, -17]


# Bad input.


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (
            "diloco(momentum=1.0)",
            "SGD(lr=0.7, momentum=1.0, nesterov=True, ramp=40): momentum must be at least 0 and below 1.",
        ),
        (
            "diloco(momentum=-0.1)",
            "SGD(lr=0.7, momentum=-0.1, nesterov=True, ramp=40): momentum must be at least 0 and below 1.",
        ),
        (
            "diloco(lr=0.0)",
            "SGD(lr=0.0, momentum=0.9, nesterov=True, ramp=40): lr must be a positive number.",
        ),
        (
            "noloco(momentum=1)",
            "SGD(lr=0.7, momentum=1, nesterov=False, ramp=40): momentum must be at least 0 and below 1.",
        ),
        (
            "slowmo(momentum=1.5)",
            "SlowMo(lr=1.0, momentum=1.5, ramp=40): momentum must be at least 0 and below 1.",
        ),
        ("slowmo(lr=-1.0)", "SlowMo(lr=-1.0, momentum=0.7, ramp=40): lr must be a positive number."),
        (
            "overlap_local_sgd(momentum=1.0)",
            "Overlap(pull=0.2, momentum=1.0): momentum must be at least 0 and below 1.",
        ),
        (
            "overlap_local_sgd(pull=0.0)",
            "Overlap(pull=0.0, momentum=0.6): pull must be above 0 and at most 1.",
        ),
        (
            "diloco(ramp=-1)",
            "SGD(lr=0.7, momentum=0.9, nesterov=True, ramp=-1): "
            "ramp must be a whole number of rounds, at least 0.",
        ),
        (
            "slowmo(ramp=2.5)",
            "SlowMo(lr=1.0, momentum=0.7, ramp=2.5): ramp must be a whole number of rounds, at least 0.",
        ),
        *[
            (
                f"eager_diloco(share={share})",
                "Eager(optimizer=SGD(lr=0.7, momentum=0.9, nesterov=True, ramp=40), "
                f"share={share}): share must be at least 0 and at most 1.",
            )
            for share in (1.5, -0.5)
        ],
        ("dasgd(keep=1.0)", "Replace(keep=1.0): keep must be at least 0 and below 1."),
        (
            "dasgd(every=3, delay=4)",
            "delay=4 with Every(steps=3): delay must not exceed the period, which can be 3.",
        ),
        (
            "cocod(every=3, delay=4)",
            "delay=4 with Every(steps=3): delay must not exceed the period, which can be 3.",
        ),
    ],
)
def test_bad_numbers(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Walk(offbeat.Solo(), expression)


@pytest.mark.parametrize("update", [offbeat.Outer, offbeat.Eager, offbeat.Gossip])
def test_a_bound_outer_optimizer(update: Callable[..., offbeat.Update]) -> None:
    sentence = (
        "Outer(Adam(...)): this optimizer is already bound to parameters: pass a function that makes one, "
        "such as SGD(lr=0.7) or functools.partial(torch.optim.Adam, lr=0.01)."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        update(torch.optim.Adam([torch.zeros(1)]))
    with pytest.raises(
        TypeError,
        match=r"^Outer\(0.7\): pass a function that makes one, such as SGD\(lr=0.7\).$",
    ):
        update(0.7)


def test_slow_weights_of_one_worker_follow_the_outer_step() -> None:
    """Everyone counts for more than a group, also where everyone is one worker."""

    def trained(comm: offbeat.Communicator) -> dict[str, Tensor]:
        net = Dyadic()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
        sync = offbeat.lookahead_diloco(
            net, optimizer, every=4, inner=2, alpha=0.5, lr=0.5, momentum=0.5, group=comm
        )
        for step in range(10):
            net(data(0, step)).backward()
            sync.step()
            optimizer.zero_grad()
        return snapshot(net)

    (alone,) = offbeat.simulate(trained, 1)
    for weights in offbeat.simulate(trained, 2):
        assert same(weights, alone)
