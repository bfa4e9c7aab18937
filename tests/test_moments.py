"""What becomes of the optimizer's moments in a round: kept, averaged or reset, in every method.

On slopes the moments do not depend on the weights, so they are known whatever a method does to those.
"""

from __future__ import annotations

import functools

import pytest
import torch
from slopes import Walk, odd

import offbeat

# Each method with its period and delay in steps; "round": it lands just before the next round begins.
METHODS: list[tuple[str, int, int | str]] = [
    ("local_sgd(every=2", 2, 0),
    ("slowmo(every=2", 2, 0),
    ("diloco(every=2", 2, 0),
    ("noloco(every=2", 2, 0),
    ("palsgd(p=0.0, every=2", 2, 0),
    ("palsgd(p=0.4, shared=False, every=5", 3, 0),
    ("adaptive(sample=100, start=2", 2, 0),
    ("adacomm(interval=100, start=2", 2, 0),
    ("dasgd(every=3, delay=1", 3, 1),
    ("cocod(every=3, delay=2", 3, 2),
    ("streaming_diloco(every=3, delay=1, fragments=1", 3, 1),
    ("streaming_diloco(every=2, delay=0, fragments=1", 2, 0),
    ("eager_diloco(every=2", 2, "round"),
    ("overlap_local_sgd(every=2", 2, "round"),
]
STEPS = 7

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.5),
    "adam": functools.partial(torch.optim.Adam, betas=(0.5, 0.75)),
}

Moments = dict[str, float]


def after_a_gradient(moments: Moments, name: str, g: float) -> Moments:
    if name == "sgd":
        return {"momentum_buffer": 0.5 * moments.get("momentum_buffer", 0.0) + g}
    return {
        "exp_avg": 0.5 * moments.get("exp_avg", 0.0) + 0.5 * g,
        "exp_avg_sq": 0.75 * moments.get("exp_avg_sq", 0.0) + 0.25 * g * g,
        "step": moments.get("step", 0.0) + 1,
    }


def by_hand(rule: str, optimizer: str, period: int, delay: int | str) -> list[list[Moments]]:
    """The moments of two workers after every step."""
    now: list[Moments] = [{}, {}]
    air: tuple[int | None, list[Moments]] | None = None  # when it lands, and what was sent
    trace = []
    for step in range(1, STEPS + 1):
        now = [after_a_gradient(moments, optimizer, odd(rank, step)) for rank, moments in enumerate(now)]
        begins = step % period == 0
        if air and (air[0] == step or (begins and air[0] is None)):
            now, air = landed(rule, now, air[1]), None
        if begins:
            due = step + delay if isinstance(delay, int) else None
            air = (due, now)
            if delay == 0:
                now, air = landed(rule, now, now), None
        trace.append(now)
    return trace


def landed(rule: str, now: list[Moments], sent: list[Moments]) -> list[Moments]:
    if rule == "reset":
        return [dict.fromkeys(moments, 0.0) for moments in now]
    if rule == "keep":
        return now
    result = []
    for rank, moments in enumerate(now):
        changed = dict(moments)
        for key in moments.keys() - {"step"}:
            mean = (sent[0][key] + sent[1][key]) / 2
            # Moved by as much as what was sent, but not beyond the mean that landed.
            low, high = sorted((moments[key], mean))
            changed[key] = min(max(moments[key] + mean - sent[rank][key], low), high)
        result.append(changed)
    return result


@pytest.mark.parametrize("rule", ["keep", "average", "reset"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("start", "period", "delay"), METHODS)
def test_moments(start: str, period: int, delay: int | str, optimizer: str, rule: str) -> None:
    def worker(comm: offbeat.Communicator) -> list[Moments]:
        walk = Walk(comm, f"{start}, moments={rule!r})", optimizer=OPTIMIZERS[optimizer], lr=0.125)
        trace = []
        for _ in range(STEPS):
            walk.sync.observe(1.0)
            walk.go()
            trace.append(found(walk.opt))
        return trace

    traces = offbeat.simulate(worker, 2)
    for step, expected in enumerate(by_hand(rule, optimizer, period, delay)):
        for rank in range(2):
            assert traces[rank][step] == pytest.approx(expected[rank], rel=1e-12), f"step {step + 1}"


def found(optimizer: torch.optim.Optimizer) -> Moments:
    (state,) = optimizer.state.values()
    return {key: float(value) for key, value in state.items()}


def test_fragments_reset_their_own_moments_only() -> None:
    def worker(comm: offbeat.Communicator) -> list[list[float]]:
        expression = "streaming_diloco(every=4, fragments=2, delay=0, moments='reset')"
        walk = Walk(comm, expression, layers=2, optimizer=OPTIMIZERS["sgd"])
        trace = []
        for _ in range(4):
            walk.go()
            states = [walk.opt.state[p] for p in walk.net.parameters()]
            trace.append([state["momentum_buffer"].item() for state in states])
        return trace

    # b = 1, 1.5, 1.75, 1.875 without a reset; layer 1 is reset after 2, layer 0 after 4.
    (trace,) = offbeat.simulate(worker, 1)
    assert trace == [[1, 1], [1.5, 0], [1.75, 1], [0, 1.5]]


def test_averaging_leaves_the_count_of_steps() -> None:
    """Also of a scalar, whose moments have the shape of that count. Rank 1 has skipped a step."""

    def worker(comm: offbeat.Communicator) -> tuple[float, float]:
        net = torch.nn.ParameterList([torch.zeros(())])
        opt = torch.optim.Adam(net.parameters(), betas=(0.5, 0.75))
        sync = offbeat.diloco(net, opt, every=3, moments="average", group=comm)
        for step in range(3):
            (net[0] * odd(comm.rank, step)).backward()
            sync.step((lambda: None) if comm.rank == 1 and step == 1 else None)
            opt.zero_grad()
        state = opt.state[net[0]]
        return state["step"].item(), state["exp_avg"].item()

    # 0.5 + 0.25 + 0.125 of slope 1, 0.5 + 0.25 of slope 3
    assert offbeat.simulate(worker, 2) == [(3, 1.5625), (2, 1.5625)]
