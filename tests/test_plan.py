"""The planner against the simulation, whose clocks it must foretell, and against figures worked by hand."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sentences import says

import offbeat
from offbeat import (
    Communicator,
    Compute,
    Constant,
    Failures,
    HeavyTailed,
    Jittered,
    Level,
    Network,
    Stragglers,
    Uneven,
)
from offbeat.plan import Cluster, Cosine, Flat, Job, forecast, plan, predict, read
from offbeat.plan.job import ProxyModel, local_optimizer
from offbeat.plan.replay import Clocks
from offbeat.plan.spent import Instant

LAYERS, WIDTH = 4, 32


def simulated(expression: str, job: Job, cluster: Cluster) -> tuple[float, int, int]:
    """Seconds, bytes per worker and rounds of the real method in virtual time."""

    def worker(comm: Communicator) -> tuple[float, int, int]:
        model = ProxyModel(job, WIDTH)
        draws = torch.Generator().manual_seed(comm.rank)  # equal workers would spare the last mean
        optimizer = local_optimizer(job, model)
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        for step in range(job.steps):
            optimizer.param_groups[0]["lr"] = job.rate(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=draws)
            sync.observe(1.0)
            sync.step()
        sync.finish()
        return comm.now(), sync.totals.bytes_sent, sync.totals.rounds

    network, compute = cluster.network, cluster.compute
    results = offbeat.simulate(worker, cluster.workers, network=network, compute=compute)
    seconds, sent, rounds = zip(*results, strict=True)
    return max(seconds), round(sum(sent) / len(sent)), rounds[0]


JOB = Job(steps=40, parameters=LAYERS * WIDTH**2, layers=LAYERS, rate=Cosine(0.1, 40), optimizer="momentum")
LINK = Network(latency=0.01, bandwidth=2e4, reduce="ring")
SLOW = Uneven(Constant(0.1), (1.0, 1.3, 1.0, 2.0))

COMPUTES = [
    pytest.param(Constant(0.1), id="alike", marks=pytest.mark.slow),
    pytest.param(SLOW, id="uneven"),
]

METHODS = [
    "ddp()",
    "local_sgd(every=4)",
    "local_sgd(every=3, moments='average')",
    "local_sgd(every=5, delay=2)",
    "local_sgd(every=4, delay='round')",
    "post_local_sgd(switch=10, every=4)",
    "hierarchical(nodes=2, inner=1, outer=4)",
    "hierarchical(nodes=((0,), (1, 2), (3,)), inner=2, outer=4)",
    "qsr(alpha=0.1, base=2, warmup=4, peak=0.1, total=40)",
    "cocod(every=8, delay=4)",
    "dasgd(every=8, delay=8)",
    "slowmo(every=6)",
    "diloco(every=8)",
    "diloco(every=8, warmup=6)",
    "streaming_diloco(every=8, fragments=4, delay=2)",
    "palsgd(every=8, p=0.3)",
    "overlap_local_sgd(every=3)",
    "noloco(every=3)",
    "diloco(every=8, reduce=Quantized(8))",
    "ddp(reduce=LowRank(4))",
    "palsgd(every=8, p=0.3, warmup=5)",
    "desloc(every=4)",
    "snoo(every=4)",
]


@pytest.mark.few(12)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("expression", METHODS)
def test_the_plan_is_what_the_simulation_does(expression: str, compute: Compute) -> None:
    cluster = Cluster(4, compute, LINK)
    seconds, sent, rounds = simulated(expression, JOB, cluster)
    told = predict(expression, JOB, cluster)
    assert told.seconds == pytest.approx(seconds, rel=0.002)
    assert told.bytes_sent == pytest.approx(sent, rel=0.002)
    assert told.rounds == rounds
    assert told.spread == pytest.approx(0.0, abs=1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize(
    "expression",
    [
        "ssd_sgd(every=4, warmup=4)",
        "ssd_sgd(every=4, warmup=13)",  # the planner does not record all steps of a long warm-up
        "od_sgd(warmup=3)",
        "eager_diloco(every=8)",
        "def_sgd(every=4)",
        "diloco(every=8, reduce=TopK(8))",
        "wagma(every=10)",
        "wagma(every=10, group_size=4)",
        "eager_sgd(every=10)",
        "eager_sgd(every=10, activation='majority')",
    ],
)
def test_the_plan_is_nearly_what_the_simulation_does(expression: str, compute: Compute) -> None:
    """How finish() closes is told in part, and codes round otherwise in layers of other sizes."""
    cluster = Cluster(4, compute, LINK)
    seconds, sent, rounds = simulated(expression, JOB, cluster)
    told = predict(expression, JOB, cluster)
    assert told.seconds == pytest.approx(seconds, rel=0.03)
    assert told.bytes_sent == pytest.approx(sent, rel=0.03)
    assert abs(told.rounds - rounds) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["ssd_sgd(every=4, warmup=4)", "od_sgd(warmup=3)"])
def test_messages_round_a_ring_are_planned_for_any_number_of_workers(expression: str) -> None:
    """A push takes as many turns as there are workers. More than 16 workers are derived from 8 and 16."""
    job, network = replace(JOB, steps=16), Network(latency=0.001, bandwidth=2e5, reduce="ring")
    cluster = Cluster(20, Constant(0.1), network)
    seconds, sent, rounds = simulated(expression, job, cluster)
    planned = predict(expression, job, cluster)
    assert planned.seconds == pytest.approx(seconds, rel=0.03)
    assert planned.bytes_sent == pytest.approx(sent, rel=0.03)
    assert abs(planned.rounds - rounds) <= 1
    large = replace(job, parameters=10**9)  # so that a turn has some bytes
    many = [predict(expression, large, replace(cluster, workers=workers)) for workers in (64, 100_000)]
    assert many[1].bytes_sent == pytest.approx(many[0].bytes_sent, rel=0.03)  # 2 (K − 1) / K of the model


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "expression", ["local_sgd(every=4)", "cocod(every=8, delay=4)", "noloco(every=3)", "wagma(every=8)"]
)
@pytest.mark.parametrize(
    "compute",
    [Jittered(0.1, jitter=0.3), HeavyTailed(0.1, tail=2.0), Stragglers(Constant(0.1), 0.1, 0.5)],
    ids=lambda value: type(value).__name__,
)
def test_runs_that_differ_are_foretold_with_their_spread(expression: str, compute: Compute) -> None:
    """The simulation is one of the runs over which the plan takes mean and deviation."""
    cluster = Cluster(4, compute, LINK)
    seconds, _, _ = simulated(expression, JOB, cluster)
    told = predict(expression, JOB, cluster)
    assert told.spread > 0
    assert abs(told.seconds - seconds) < 4 * told.spread
    assert told.computing + told.waiting + told.exposed == pytest.approx(told.seconds, rel=0.1)


# Schedules.


@pytest.mark.parametrize(
    ("peak", "steps", "warmup", "base", "alpha", "rounds"),
    [
        (0.008, 93_600, 10_000, 4, 0.0175, 9_711),
        (0.008, 93_600, 10_000, 8, 0.0175, 6_461),
        (0.8, 62_400, 1_560, 2, 0.2, 24_792),
        (0.8, 62_400, 1_560, 4, 0.25, 12_539),
    ],
)
@pytest.mark.slow
def test_published_rounds_of_qsr_fall_out(
    peak: float, steps: int, warmup: int, base: int, alpha: float, rounds: int
) -> None:
    job = Job(steps=steps, parameters=86_000_000, rate=Cosine(peak, steps, warmup, floor=1e-6))
    cluster = Cluster(16, Constant(1.0), Network(bandwidth=1e9))
    told = predict(f"qsr(alpha={alpha}, base={base}, warmup={warmup}, total={steps})", job, cluster)
    assert told.rounds == rounds
    ddp = 2 * 4 * 86_000_000 * 15 / 16 * steps
    assert told.bytes_sent / ddp == pytest.approx(rounds / steps, rel=0.001)
    # Windows over the run instead of all of it: within half a percent of what can be summed up by hand.
    exact = steps + rounds * 2 * 4 * 86_000_000 * 15 / 16 / 1e9
    assert told.seconds == pytest.approx(exact, rel=0.005)


# By hand. A million floats among four workers are 6 MB; at 6 MB/s a mean takes one second.

HAND = Job(steps=64, parameters=1_000_000, layers=4, backward=0)
WIRE = Network(bandwidth=6e6)


def test_ddp_by_hand() -> None:
    """64 steps of a second, each with a second of communication, and the start: 3 MB in half a second."""
    told = predict("ddp()", HAND, Cluster(4, Constant(1.0), WIRE))
    assert told.seconds == pytest.approx(64 * 2 + 0.5, rel=1e-3)
    assert told.exposed == pytest.approx(64.5, rel=1e-3)
    assert told.computing == 64
    assert told.utilisation == pytest.approx(64 / 128.5, rel=1e-3)
    assert told.bytes_sent == pytest.approx(64 * 6e6 + 3e6, rel=1e-3)
    assert (told.rounds, told.spread, told.waiting, told.failing) == (64, 0, 0, 0)
    assert told.copies == pytest.approx(1.0, abs=0.01)


def test_gradients_that_leave_during_the_backward_pass_by_hand() -> None:
    """Buckets of 1/4, 1/2 and 1/4 of a second are ready after 3/6, 5/6 and 6/6 of a step. On the link they
    end at 9/12, 16/12 and 19/12 seconds. Only the first round waits for the end of the step."""
    told = predict("ddp()", replace(HAND, backward=2 / 3), Cluster(4, Constant(1.0), WIRE))
    assert told.seconds == pytest.approx(64 + 1 + 63 * 7 / 12 + 0.5, rel=1e-3)
    assert told.exposed == pytest.approx(1 + 63 * 7 / 12 + 0.5, rel=1e-3)
    assert told.hidden == pytest.approx(63 * 0.5, rel=1e-3)
    assert told.bytes_sent == predict("ddp()", HAND, Cluster(4, Constant(1.0), WIRE)).bytes_sent
    assert told.notes == (
        "its gradients leave in 3 parts during the backward pass, which takes 67% of a step (--backward)",
    )
    # On a link ten times as fast, only the last bucket is left at the end of a step.
    fast = predict("ddp()", replace(HAND, backward=2 / 3), Cluster(4, Constant(1.0), Network(bandwidth=6e7)))
    assert fast.seconds == pytest.approx(64 + 0.1 + 63 * 0.025 + 0.05, rel=1e-3)
    for late in ("ddp(delay=1)", "local_sgd(every=1)"):  # these do not overlap with the backward pass
        same = [predict(late, replace(HAND, backward=b), Cluster(4, Constant(1.0), WIRE)) for b in (0, 0.5)]
        assert same[0].seconds == same[1].seconds


@pytest.mark.parametrize(
    ("expression", "near"),
    [
        ("ddp()", 0.005),
        *(
            pytest.param(f"ddp(reduce={code})", 0.005, marks=pytest.mark.slow)
            for code in ("Quantized(8)", "Quantized(4)", "LowRank(4)")
        ),
    ],
)
@pytest.mark.parametrize("compute", [Constant(0.1), SLOW], ids=["alike", "uneven"])
def test_the_overlap_is_what_the_simulation_does(expression: str, near: float, compute: Compute) -> None:
    """A real backward pass on a model of several buckets, also if the messages of a code have to queue."""
    width = 300
    layers = 6 if expression == "ddp()" else 24
    job = Job(steps=8, parameters=layers * width**2, layers=layers, optimizer="sgd")
    cluster = Cluster(4, compute, Network(latency=0.002, bandwidth=2e7, reduce="ring"))

    def worker(comm: Communicator) -> float:
        model = ProxyModel(job, width)
        optimizer, draws = local_optimizer(job, model), torch.Generator().manual_seed(comm.rank)
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        for _ in range(job.steps):
            optimizer.zero_grad()
            x = torch.randn(1, width, generator=draws)
            for layer in model.layers:
                x = x @ layer[0] / width  # type: ignore[index]
            x.mean().backward()
            sync.step()
        sync.finish()
        return comm.now()

    seconds = max(offbeat.simulate(worker, 4, network=cluster.network, compute=compute))
    told = predict(expression, job, cluster)
    assert told.seconds == pytest.approx(seconds, rel=near)
    assert told.seconds < 0.97 * predict(expression, replace(job, backward=0), cluster).seconds


def test_what_is_hidden_and_what_is_not() -> None:
    """Seven rounds land, the eighth with finish(), which then takes a mean; each flies for a second."""
    hidden = predict("cocod(every=8, delay=2)", HAND, Cluster(4, Constant(1.0), WIRE))
    assert hidden.seconds == pytest.approx(64 + 0.5 + 1 + 1, rel=1e-3)
    assert hidden.hidden == pytest.approx(7, rel=0.01)
    half = predict("cocod(every=8, delay=2)", HAND, Cluster(4, Constant(0.25), WIRE))
    assert half.seconds == pytest.approx(16 + 7 * 0.5 + 0.5 + 1 + 1, rel=1e-3)


def test_the_bandwidth_that_ddp_would_need_by_hand() -> None:
    """local_sgd(every=8) waits for 8 means, ddp for 64: it needs eight times the bandwidth, about."""
    ranked = plan(["local_sgd(every=8)"], HAND, Cluster(4, Constant(1.0), WIRE))
    (told,) = ranked.predictions
    assert told.seconds == pytest.approx(64 + 8 + 0.5, rel=1e-3)
    # 64 + 64.5·6e6/b = 72.5
    assert told.ddp_needs == pytest.approx(64.5 / 8.5 * 6e6, rel=0.02)
    # (64 + 64.5 s) / (64 + 8.5 s) = 1.05 at s = 0.0577 of the seconds
    assert told.break_even == pytest.approx(6e6 / (0.05 * 64 / (64.5 - 1.05 * 8.5)), rel=0.05)
    assert [seconds for _, seconds in told.curve] == sorted((s for _, s in told.curve), reverse=True)


def test_failures_by_hand() -> None:
    """Four workers that fail twice an hour: 8/3600 a second, each 100 s and half of 60 s of work again."""
    cluster = Cluster(4, Constant(1.0), WIRE, Failures(per_hour=2.0, restart=100.0, checkpoint=60.0))
    told, without = predict("ddp()", HAND, cluster), predict("ddp()", HAND, Cluster(4, Constant(1.0), WIRE))
    number = without.seconds * 8 / 3600
    assert told.failing == pytest.approx(number * 130)
    assert told.seconds == pytest.approx(without.seconds + number * 130)
    assert told.spread == pytest.approx((number * (130**2 + 60**2 / 12)) ** 0.5)


@pytest.mark.slow
def test_failures_are_those_of_the_simulation() -> None:
    failures = Failures(per_hour=160.0, restart=1.25, checkpoint=2.5)

    def worker(comm: Communicator) -> float:
        model = ProxyModel(JOB, 8)
        sync = offbeat.local_sgd(model, local_optimizer(JOB, model), every=5, group=comm)
        for _ in range(1000):
            sync.step()
        return comm.now()

    job = Job(steps=1000, parameters=LAYERS * 64, layers=LAYERS, optimizer="momentum")
    told = predict("local_sgd(every=5)", job, Cluster(4, Constant(0.1), failures=failures))
    found = max(offbeat.simulate(worker, 4, compute=Constant(0.1), failures=failures))
    assert 100 < found
    assert abs(found - told.seconds) < 3 * told.spread


def test_groups_that_share_an_uplink_share_its_bandwidth() -> None:
    """Pairs across two nodes of two: 8 MB over each uplink, of both pairs; inside, none."""
    nodes = Network(bandwidth=1e9, levels=(Level(2, bandwidth=4e6),))
    across = predict(
        "hierarchical(nodes=((0, 2), (1, 3)), inner=1, outer=64)", HAND, Cluster(4, Constant(1.0), nodes)
    )
    inside = predict("hierarchical(nodes=2, inner=1, outer=64)", HAND, Cluster(4, Constant(1.0), nodes))
    assert across.seconds - inside.seconds == pytest.approx(63 * (8e6 / 4e6 - 4e6 / 1e9), rel=1e-3)


COPIES = {
    "local_sgd(every=4)": 1,
    "cocod(every=4, delay=2)": 2,
    "dasgd(every=4)": 1,
    "hierarchical(nodes=2, inner=1, outer=4)": 2,
    "slowmo(every=4)": 3,
    "diloco(every=4)": 3,
    "streaming_diloco(every=4, fragments=4)": 3.2,  # with what its code works in
    "eager_diloco(every=4)": 5,
    "ssd_sgd(every=4, warmup=50)": 6.5,  # after the warm-up
}


@pytest.mark.parametrize("expression", COPIES)
def test_copies_of_the_model(expression: str) -> None:
    told = predict(expression, HAND, Cluster(4, Constant(1.0), WIRE))
    assert told.copies == pytest.approx(COPIES[expression], abs=0.15)


def test_codes_that_send_in_pieces_are_planned() -> None:
    """With two workers, the largest of the small models sends the mean of a fragment in two pieces."""
    cluster = Cluster(2, Constant(1.0), Network(bandwidth=1e9))
    sent, rounds = [], []
    for steps in (64 * 4, 64 * 8):
        told = predict("streaming_diloco(every=64, fragments=3)", Job(steps, 12_000_000), cluster)
        sent.append(told.bytes_sent)
        rounds.append(told.rounds)
    assert rounds[1] - rounds[0] == 12
    # Each sends half of a third of the model to the other, and the mean of its own half: 4.5 bits a value.
    assert sent[1] - sent[0] == pytest.approx(12 * 4e6 * 4.5 / 8, rel=0.01)


def test_a_method_without_a_row_of_its_own() -> None:
    """Parts put together anew are planned like any other: a schedule no method has, in another update."""
    told = predict("diloco(every=Then(32, Every(4), Every(16)))", HAND, Cluster(4, Constant(1.0), WIRE))
    assert told.rounds == 8 + 2


def test_maxima_are_taken_over_workers_not_means() -> None:
    """The expected maximum of 1 000 log-normal times, against a draw of its own."""
    compute = Jittered(1.0, jitter=0.2)
    told = predict("ddp()", Job(steps=100, parameters=100), Cluster(1000, compute, Network()))
    torch.manual_seed(0)
    sigma = torch.tensor(1.04).log().sqrt()
    expected = (torch.randn(1000, 2000) * sigma - sigma**2 / 2).exp().amax(0).mean().item()
    assert told.seconds == pytest.approx(100 * expected, rel=0.01)


def test_who_waits_for_nobody_waits_less() -> None:
    """A twentieth of the steps is late by ten steps: of 64 workers one always is, and ddp waits for it."""
    cluster = Cluster(64, Stragglers(Constant(0.1), 0.05, 1.0), Network(bandwidth=1e9))
    told = {
        e: predict(e, HAND, cluster) for e in ("ddp()", "wagma(every=16)", "hierarchical(nodes=8, outer=16)")
    }
    ddp, wagma, blocking = told.values()
    assert wagma.waiting < 0.6 * ddp.waiting
    assert wagma.seconds < 0.7 * blocking.seconds  # groups as large, but with those who are late


@contextmanager
def count_calls() -> Iterator[list[int]]:
    """How many functions written in Python are called."""
    number, before = [0], sys.getprofile()

    def look(frame: object, event: str, argument: object) -> None:
        number[0] += event == "call"

    sys.setprofile(look)
    try:
        yield number
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("expression", ["ssd_sgd(every=4, warmup=4)", "od_sgd(warmup=3)"])
def test_steps_that_only_repeat_are_not_replayed(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    act = Clocks.act
    monkeypatch.setattr(Clocks, "act", lambda *given, **more: (made.append(1), act(*given, **more)))
    job, cluster = replace(JOB, steps=200, rate=Flat(0.1)), Cluster(4, Constant(0.1), LINK)
    short = predict(expression, job, cluster)
    assert len(made) < 100
    monkeypatch.setattr(Instant, "repeats", lambda *_: False)
    full = predict(expression, job, cluster)
    assert len(made) > 200
    for name in ("seconds", "computing", "exposed", "hidden", "waiting"):
        assert getattr(short, name) == pytest.approx(getattr(full, name), rel=1e-9, abs=1e-9)
    assert [t for _, t in short.curve] == pytest.approx([t for _, t in full.curve], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["ddp()", "local_sgd(every=1, delay=1)"])
def test_equal_windows_are_worked_out_once(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(steps=10_000, parameters=4_000_000, layers=4, rate=Cosine(0.1, 10_000))
    cluster = Cluster(256, Constant(0.25), LINK)
    monkeypatch.setattr(forecast, "_SECONDS", 0.01)
    made = predict(expression, job, cluster)
    monkeypatch.setattr(forecast.Forecast, "_describe", lambda *_: None)
    assert predict(expression, job, cluster) == made


@pytest.mark.parametrize("expression", ["diloco(every=8)", "ssd_sgd(every=4)", "local_sgd(every=8)"])
def test_a_plan_does_not_load_the_compiler(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes longer than the plan."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        call = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        monkeypatch.delattr(call, "__dynamo_disable", raising=False)  # or the earlier import is remembered
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    predict(expression, JOB, Cluster(4, Constant(0.1), LINK))


@pytest.mark.slow
def test_a_hundred_thousand_workers() -> None:
    """Nodes of eight in regions of a thousand, each group with the maximum over its own members.

    Few calls per worker, where each of the 1000 steps has a time for each of them.
    """
    levels = (Level(8, 5e10, 5e-6), Level(1000, 5e9, 5e-3))
    cluster = Cluster(100_000, Jittered(0.5, 0.1), Network(1e-6, 2e11, "ring", levels))
    job = Job(steps=1000, parameters=10**8)
    with count_calls() as calls:
        local = predict("hierarchical(nodes=8, inner=4, outer=1000)", job, cluster)
        everyone = predict("local_sgd(every=4)", job, cluster)
    assert calls[0] < 10 * cluster.workers
    assert local.waiting < 0.6 * everyone.waiting
    assert everyone.waiting > 0.1 * everyone.computing
    assert everyone.computing == pytest.approx(500, rel=0.01)


# What it says.


def test_the_fastest_comes_first_and_why() -> None:
    told = plan(
        ["ddp()", "local_sgd(every=8)", "cocod(every=8, delay=2)"], HAND, Cluster(4, Constant(1.0), WIRE)
    )
    assert [p.method for p in told.predictions] == ["cocod(every=8, delay=2)", "local_sgd(every=8)", "ddp()"]
    assert told.why == (
        "cocod(every=8, delay=2) is 1.93 times as fast as ddp(): it sends 14.7% of the bytes and hides "
        "74% of its communication behind computation, so that messages hold its workers up for 4% of the "
        "run instead of 50%."
    )


def test_where_there_is_nothing_to_win() -> None:
    told = plan(["local_sgd(every=8)", "ddp()"], HAND, Cluster(4, Constant(1.0), Network(bandwidth=6e9)))
    assert told.why == (
        "local_sgd(every=8) is as good as any: ddp() waits for messages in only 0% of the run, so "
        "communicating less often saves little."
    )


@pytest.mark.parametrize(
    ("compute", "network", "share"),
    [
        (Constant(0.1), Network(bandwidth=6e5), "99%"),
        (Stragglers(Constant(0.1), 0.05, 1.0), Network(bandwidth=1e12), "6"),
    ],
    ids=["messages", "stragglers"],
)
def test_a_wait_that_nothing_here_shortens_is_not_called_short(
    compute: Compute, network: Network, share: str
) -> None:
    told = plan(["ddp()"], HAND, Cluster(8, compute, network))
    start = "ddp() waits for messages or slower workers in "
    assert told.why.startswith(start + share)
    assert told.why.endswith("% of the run, so a method that communicates less often may save some of it.")


def test_what_is_slower_than_ddp_is_said_to_be() -> None:
    told = plan(["od_sgd(warmup=64)"], HAND, Cluster(4, Constant(0.01), Network(latency=0.1, bandwidth=6e7)))
    assert told.why.startswith("None of these: ddp() would be 2.")


def test_stragglers_are_a_reason() -> None:
    cluster = Cluster(16, Stragglers(Constant(0.1), 0.05, 1.0), Network(bandwidth=1e12))
    told = plan(["local_sgd(every=16)"], HAND, cluster)
    assert told.why.startswith("local_sgd(every=16) is 2.")
    assert "for slower ones instead of" in told.why


WRONG = [
    (
        lambda: Cluster(0, Constant(1.0)),
        "Cluster(workers=0): workers must be a whole number from 1 to 1000000.",
    ),
    (
        lambda: Cluster(2.5, Constant(1.0)),
        "Cluster(workers=2.5): workers must be a whole number from 1 to 1000000.",
    ),
    (lambda: Job(steps=0, parameters=1), "Job(steps=0): steps must be a whole number from 1 to 1000000."),
    (
        lambda: Job(steps=1, parameters=-5),
        "Job(parameters=-5): parameters must be a whole number from 1 to 1000000000000000.",
    ),
    (
        lambda: Job(steps=1, parameters=1, dtype="int8"),
        "Job(dtype='int8'): choose one of 'float32', 'float64', 'bfloat16', 'float16'.",
    ),
    (
        lambda: Cosine(0.1, 10, warmup=10),
        "Cosine(peak=0.1, steps=10, warmup=10, floor=0.0): warmup must be shorter than steps.",
    ),
    (
        lambda: Cosine(-0.1, 10),
        "Cosine(peak=-0.1, steps=10, warmup=0, floor=0.0): peak must be a positive number above floor.",
    ),
    (lambda: Flat(-1.0), "Flat(rate=-1.0): the rate must be a finite number, 0 or more."),
    (lambda: plan([], HAND, Cluster(4, Constant(1.0))), "plan(methods=[]): name at least one method."),
    (
        lambda: predict("local_sgd(every=65)", HAND, Cluster(4, Constant(1.0))),
        "local_sgd(every=65): there is no round in 64 steps: shorten the period or lengthen the run.",
    ),
    (
        lambda: predict("hierarchical(nodes=3)", HAND, Cluster(4, Constant(1.0))),
        "Subgroups(3): 4 workers do not divide into groups of 3; for uneven groups, list the ranks of each.",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), WRONG, ids=[str(sentence) for _, sentence in WRONG])
def test_nonsense_gets_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with says(ValueError, sentence):
        make()


def test_a_step_must_be_a_value() -> None:
    with says(TypeError, "Cluster(compute=0.5): give a value such as Constant(0.2)."):
        Cluster(4, 0.5)


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from offbeat import Constant\nfrom offbeat.plan import Cluster\n\nours = Cluster(8, Constant(0.5))\n"
    )
    assert read(path, Cluster) == Cluster(8, Constant(0.5))
    assert read(path, Job) is None
    path.write_text("ours = (")
    with pytest.raises(ValueError, match=r"mine\.py'\): this file cannot be read"):
        read(path, Cluster)
