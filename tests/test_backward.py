"""Gradients that leave during the backward pass: the mean is the one of gradients that leave at the step."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Pool
from sentences import says
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Worker
from offbeat.engine import buckets
from offbeat.engine import pipeline as pipelines
from offbeat.engine.buckets import Buckets, cut_sizes
from offbeat.engine.exchange import Exchange
from offbeat.simulate import Constant

WIDTH = 2**16  # values of a layer: as many bytes as the shortest bucket
CODES = ["Quantized(4)", "ErrorFeedback(Quantized(4))", "ErrorFeedback(TopK(64))", "Mean('bfloat16')"]
METHODS = ["ddp()", *[f"ddp(reduce={code})" for code in CODES]]
REMEMBERING = METHODS[2]  # what it sends depends on what it sent
ONE_FAST = [
    method if method == REMEMBERING else pytest.param(method, marks=pytest.mark.slow) for method in METHODS
]
Use = Callable[[int, int, int], float]  # by rank, step and layer: the slope there; 0: unused


class Layers(nn.Module):
    """Layers that are used one after the other. The gradient of layer i is the slope given for it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(WIDTH) for _ in range(layers)])
        self.spread = torch.arange(WIDTH).sub(WIDTH // 2).div(WIDTH)

    def forward(self, slopes: list[float]) -> Tensor:
        out = torch.zeros(())
        for layer, slope in zip(self.layers, slopes, strict=True):
            out = out + (layer * self.spread).sum() * slope if slope else out
        return out


def slope(rank: int, step: int, layer: int) -> float:
    """Multiples of a quarter, so that sums are exact."""
    return (1 + rank + 2 * step + 3 * layer) / 4


class Run:
    """A worker of `ddp` that can look into its buckets."""

    def __init__(
        self, comm: offbeat.Communicator, expression: str = "ddp()", *, use: Use = slope, late: bool = False
    ) -> None:
        self.net, self.comm, self.use, self.late, self.steps = Layers(), comm, use, late, 0
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.sync = offbeat.method(expression)(self.net, self.opt, group=comm)
        exchange = self.sync.parts[0]
        assert isinstance(exchange, Exchange)
        assert isinstance(exchange.sender, Buckets)
        self.sender = exchange.sender
        self.left: list[int] = []  # buckets that had left before each step

    @property
    def most(self) -> int:
        """The number of buckets that can leave before the step: all but the last."""
        return len(self.sender.parts) - 1

    def backward(self, scale: float = 1.0) -> None:
        slopes = [scale * self.use(self.comm.rank, self.steps, layer) for layer in range(4)]
        if self.late:
            with self.sync.accumulate():
                self.net(slopes).backward()
        else:
            self.net(slopes).backward()

    def step(self, **options: Any) -> None:
        self.left.append(len(self.sender._in_flight))
        self.sync.step(**options)
        self.opt.zero_grad()
        self.steps += 1

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self.backward()
            self.step()
        return self

    def weights(self) -> list[Tensor]:
        return [layer.detach().clone() for layer in self.net.layers]

    def load(self, other: Run) -> Run:
        self.net.load_state_dict(other.net.state_dict())
        self.sync.load_state_dict(other.sync.state_dict())
        self.steps = other.steps
        return self


class Broken(Exception):
    pass


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken


def break_off(run: Run) -> None:
    """A pass that raises after two buckets have left, if they may."""
    first = Break.apply((run.net.layers[0] * run.net.spread).sum())
    rest = sum((layer * run.net.spread).sum() for layer in run.net.layers[2:])
    with pytest.raises(Broken):
        (first + rest).backward()


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def alike(worker: Callable[[offbeat.Communicator], list[Tensor]], expected: list[Tensor]) -> None:
    """Every simulated worker ends with these weights."""
    for weights in offbeat.simulate(worker, 3):
        assert equal(weights, expected)


def plain(expression: str = "ddp()", steps: int = 4, **options: Any) -> list[Tensor]:
    """The weights after some steps whose gradients leave at the step."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm, expression, late=True, **options).go(steps)
        assert run.left == [0] * steps
        return run.weights()

    return offbeat.simulate(worker, 3)[0]


# The mean does not depend on when a bucket leaves.


@pytest.mark.parametrize("expression", METHODS)
def test_a_mean_does_not_depend_on_when_its_buckets_leave(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm, expression).go(4)
        assert run.left == [0, *[run.most] * 3]  # the first step teaches which gradients there are
        return run.weights()

    alike(worker, plain(expression))


def test_a_mean_in_buckets_is_that_of_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(comm: offbeat.Communicator) -> list[Tensor]:
        net = Layers()
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        with offbeat.ddp(net, opt, group=comm) as sync:
            assert not isinstance(sync.parts[0].sender, Buckets)
            for step in range(4):
                net([slope(comm.rank, step, layer) for layer in range(4)]).backward()
                sync.step()
                opt.zero_grad()
        return [layer.detach() for layer in net.layers]

    in_buckets = plain()
    monkeypatch.setattr(buckets, "_LEAST", 2**30)
    assert equal(offbeat.simulate(whole, 3)[0], in_buckets)


def test_the_mean_in_numbers() -> None:
    """x = −½ Σ spread·mean of the slopes, whose mean over three ranks is that of rank 1."""
    spread = Layers().spread
    for layer, weights in enumerate(plain()):
        total = sum(slope(1, step, layer) for step in range(4))
        assert torch.equal(weights, -0.5 * total * spread)


def real(comm: offbeat.Communicator, expression: str) -> list[Tensor]:
    run = Run(comm, expression).go(3)
    run.sync.finish()
    assert run.left == [0, run.most, run.most]
    return run.weights()


@pytest.mark.parametrize("expression", ONE_FAST)
def test_simulation_equals_gloo_to_the_bit(pool: Pool, expression: str) -> None:
    expected = offbeat.simulate(lambda comm: real(comm, expression), 4)
    for weights, others in zip(pool.run(real, expression), expected, strict=True):
        assert equal(weights, others)


# Several passes, changed gradients, and passes without a step: what is averaged is what is there at the step.


def passes(comm: offbeat.Communicator, expression: str, counts: list[int], *, context: bool) -> Run:
    """Steps of so many backward passes, all but the last inside `accumulate()`, or none."""
    run = Run(comm, expression)
    for count in counts:
        for i in range(count):
            if context and i < count - 1:
                with run.sync.accumulate():
                    run.backward(1 / (1 + i))
            else:
                run.backward(1 / (1 + i))
        run.step()
    return run


def late_passes(expression: str, counts: list[int]) -> list[Tensor]:
    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm, expression, late=True)
        for count in counts:
            for i in range(count):
                run.backward(1 / (1 + i))
            run.step()
        return run.weights()

    return offbeat.simulate(worker, 3)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("expression", ONE_FAST)
@pytest.mark.parametrize("context", [True, False])
def test_several_passes(expression: str, context: bool) -> None:
    """Without the context the buckets leave with the last of as many passes as in the step before."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = passes(comm, expression, [2, 2, 2, 2], context=context)
        assert run.left == [0, *[run.most] * 3]
        assert run.sender._times == 0
        return run.weights()

    alike(worker, late_passes(expression, [2, 2, 2, 2]))


@pytest.mark.parametrize("expression", ONE_FAST)
def test_more_passes_than_before(expression: str, caplog: pytest.LogCaptureFixture) -> None:
    """The third and the last step have more passes than the one before: they send twice."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = passes(comm, expression, [1, 1, 3, 3, 2, 3], context=False)
        assert run.left == [0, run.most, run.most, 0, 0, run.most]
        sizes = [report.bytes_sent for report in run.sync.reports]
        for twice in (2, 5):
            assert sizes[twice] - 64 * 2 == pytest.approx(2 * (sizes[1] - 64 * 2), rel=0.01)
        assert sizes[1] == sizes[3] == sizes[4]
        return run.weights()

    with caplog.at_level(logging.WARNING, "offbeat"):
        alike(worker, late_passes(expression, [1, 1, 3, 3, 2, 3]))
    (message,) = {record.getMessage() for record in caplog.records}
    assert "sent twice. Wrap all backward passes of a step but the last in sync.accumulate()" in message


def test_one_unusual_step_does_not_end_the_overlap() -> None:
    """It sends twice, and the next one leaves at the step. After that buckets leave early again."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = passes(comm, "ddp()", [1, 1, 2, 1, 1, 1], context=False)
        assert run.left == [0, 2, 2, 0, 2, 2]
        assert run.sender._times == 1
        return run.weights()

    alike(worker, late_passes("ddp()", [1, 1, 2, 1, 1, 1]))


def test_an_accumulation_inside_another() -> None:
    """The inner one does not end the outer one."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm).go(2)
        with run.sync.accumulate():
            with run.sync.accumulate():
                run.backward(0.5)
            run.backward(0.25)
        assert len(run.sender._in_flight) == 0
        run.backward(0.25)
        run.step()
        assert (run.left, run.sender._times) == ([0, 2, 2], 0)
        return run.go(1).weights()

    alike(worker, plain())


def test_a_held_pass_after_buckets_have_left() -> None:
    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm).go(2)
        run.backward(0.5)
        with run.sync.accumulate():
            run.backward(0.5)
        run.step()
        assert (run.left, run.sender._times) == ([0, 2, 2], 1)
        return run.go(1).weights()

    alike(worker, plain())


@pytest.mark.parametrize("expression", ONE_FAST)
def test_a_pass_more_on_one_rank_only(expression: str) -> None:
    def worker(comm: offbeat.Communicator, late: bool) -> list[Tensor]:
        run = Run(comm, expression, late=late).go(2)
        for _ in range(1 + (comm.rank == 1)):
            run.backward()
        run.step()
        return run.go(3).weights()

    expected = offbeat.simulate(lambda comm: worker(comm, True), 3)[0]
    alike(lambda comm: worker(comm, False), expected)


def test_averaged_buffers_of_a_round_that_is_sent_twice() -> None:
    """The mean of the ranks' numbers, 0 to 2, however often it is sent."""

    def worker(comm: offbeat.Communicator) -> float:
        net = Layers()
        net.register_buffer("own", torch.zeros(1))
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        exchange = Exchange(offbeat.grads(net), when=offbeat.Every(1), among=comm, buffers="average")
        sync = offbeat.Synchronizer(opt, [exchange])
        for count in (1, 1, 2):
            for _ in range(count):
                net([1.0] * 4).backward()
            net.own.fill_(comm.rank)
            sync.step()
            opt.zero_grad()
        assert exchange.sender._times == 1
        return net.own.item()

    assert offbeat.simulate(worker, 3) == [1.0] * 3


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.net.parameters(), 0.5)


def scale(run: Run) -> None:
    torch._foreach_mul_([p.grad for p in run.net.parameters()], 0.5)


def drop(run: Run) -> None:
    run.net.layers[3].grad = None


def swap(run: Run) -> None:
    run.net.layers[3].grad = torch.ones(WIDTH)


def clear(run: Run) -> None:
    run.opt.zero_grad(set_to_none=False)
    run.backward()


def skip(run: Run) -> None:
    """A step that the caller leaves out."""
    run.opt.zero_grad()
    run.backward(0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [clip, scale, drop, swap, clear, skip])
@pytest.mark.parametrize("expression", ONE_FAST[:3])
def test_gradients_that_change_before_the_step(expression: str, change: Callable[[Run], None]) -> None:
    """Whoever clips before the step gets clipped gradients, at the price of sending them twice at times."""

    def worker(comm: offbeat.Communicator, late: bool) -> list[Tensor]:
        run = Run(comm, expression, late=late)
        for _ in range(6):
            run.backward()
            change(run)
            run.step()
        if not late:
            twice = change not in (clear, skip)  # these add a pass, and the buckets leave with the last one
            most = run.most
            assert run.left == ([0, most, 0, most, 0, 0] if twice else [0, *[most] * 5])
            assert run.sender._times == (2 if twice else 0)
        return run.weights()

    expected = offbeat.simulate(lambda comm: worker(comm, True), 3)[0]
    alike(lambda comm: worker(comm, False), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("expression", METHODS[:3])
def test_an_error_in_the_middle_of_a_pass(expression: str) -> None:
    """On rank 1, after two buckets have left. It repeats the pass."""

    def worker(comm: offbeat.Communicator, late: bool) -> list[Tensor]:
        run = Run(comm, expression, late=late).go(2)
        if comm.rank == 1:
            break_off(run)
            run.opt.zero_grad()
        return run.go(2).weights()

    expected = offbeat.simulate(lambda comm: worker(comm, True), 3)[0]
    alike(lambda comm: worker(comm, False), expected)


# Gradients that are missing.


@pytest.mark.parametrize("expression", METHODS[:3])
def test_gradients_that_are_missing_at_times(expression: str) -> None:
    """Layer 3, of the first bucket, is unused on rank 1 in odd steps; layer 1 everywhere, from step 2 on."""

    def use(rank: int, step: int, layer: int) -> float:
        missing = (layer == 3 and rank == 1 and step % 2) or (layer == 1 and step >= 2)
        return 0.0 if missing else slope(rank, step, layer)

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm, expression, use=use).go(5)
        assert run.sender._times == 0
        # Where layer 1 is missing, the buckets before its own leave.
        most = run.most
        some = [0, 0, most - 1, 0, most - 1] if comm.rank == 1 else [0, most, most - 1, most - 1, most - 1]
        assert run.left == some
        return run.weights()

    alike(worker, plain(expression, 5, use=use))


def test_a_gradient_that_never_comes_holds_nothing_up() -> None:
    def use(rank: int, step: int, layer: int) -> float:
        return 0.0 if layer == 3 else slope(rank, step, layer)

    def worker(comm: offbeat.Communicator) -> list[int]:
        run = Run(comm, use=use)
        for _ in range(3):
            run.backward()
            run.sync.step()
            run.left.append(len(run.sync.reports))
            assert run.net.layers[3].grad is None
            run.opt.zero_grad()
        run.backward()
        return [len(run.sender._in_flight)]

    assert offbeat.simulate(worker, 2) == [[2], [2]]


def test_tied_and_frozen_parameters() -> None:
    """A tied parameter grows once per pass, however often it is used."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        net = Layers(6)
        net.layers[5] = net.layers[1]
        net.layers[4].requires_grad = False
        opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
        sync = offbeat.ddp(net, opt, group=comm)
        for _ in range(3):
            net([1.0 + comm.rank] * 6).backward()
            left = len(sync.parts[0].sender._in_flight)
            sync.step()
            opt.zero_grad()
        assert (left, sync.parts[0].sender._times) == (2, 0)
        return [layer[0].item() / net.spread[0].item() for layer in net.layers]

    assert offbeat.simulate(worker, 2) == [[-2.25, -4.5, -2.25, -2.25, 0.0, -4.5]] * 2


# Rounds that cannot leave early.


def test_weighted_rounds_leave_at_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """The weights are known at the step only. The first weighted round is sent twice, without a warning.

    With weights 1, 2 and 3 the mean rank is 4/3, in two steps.
    """

    def worker(comm: offbeat.Communicator, late: bool) -> list[Tensor]:
        run = Run(comm, late=late).go(2)
        for samples in (1 + comm.rank, 1 + comm.rank, 2, 2):
            run.backward()
            run.step(samples=samples)
        run.go(2)
        if not late:
            assert run.left == [0, 2, 2, 0, 0, 0, 0, 2]
        return run.weights()

    expected = offbeat.simulate(lambda comm: worker(comm, True), 3)[0]
    total = sum(slope(1, step, 0) for step in range(8)) + 2 * (4 / 3 - 1) / 4
    torch.testing.assert_close(expected[0], -0.5 * total * Layers().spread)
    with caplog.at_level(logging.WARNING, "offbeat"):
        alike(lambda comm: worker(comm, False), expected)
        assert caplog.records == []


def test_a_change_after_a_weighted_round_is_still_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def worker(comm: offbeat.Communicator) -> int:
        run = Run(comm).go(2)
        run.backward()
        run.step(samples=1)
        run.go(2).backward()
        run.backward()
        run.step()
        return run.sender._times

    with caplog.at_level(logging.WARNING, "offbeat"):
        assert offbeat.simulate(worker, 2) == [2, 2]
    assert len(caplog.records) == 2, "one per rank"


def test_a_model_that_is_converted_before_the_first_step() -> None:
    """The mean of sevenths in float64, which float32 would round."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm)
        run.net.double()
        run.net.spread = run.net.spread.double() / 7
        for _ in range(3):
            run.net([1.0 + comm.rank] * 4).backward()
            run.step()
        assert run.left == [0, 2, 2]
        return run.weights()

    mean = 1.5 * (Layers().spread.double() / 7)
    assert not torch.equal(mean, mean.float().double())
    for weights in offbeat.simulate(worker, 2):
        assert equal(weights, [-0.5 * mean - 0.5 * mean - 0.5 * mean] * 4)


def test_no_bucket_leaves_where_no_round_follows() -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        run = Run(comm, "post_local_sgd(switch=3, every=2)").go(8)
        run.sync.finish()
        return run.left

    assert offbeat.simulate(worker, 2) == [[0, 2, 2, 0, 0, 0, 0, 0]] * 2


def test_one_worker_sends_nothing_early() -> None:
    assert offbeat.simulate(lambda comm: Run(comm).go(3).left, 1) == [[0, 0, 0]]


# Between a pass and its step, when fewer buckets have left on one rank than on the others.


def uneven(rank: int, step: int, layer: int) -> float:
    return 0.0 if (rank, step, layer) == (1, 2, 2) else slope(rank, step, layer)


def between(comm: offbeat.Communicator, expression: str, act: str, late: bool = False) -> list[Tensor]:
    run = Run(comm, expression, use=uneven, late=late).go(2)
    saved, before = run.sync.state_dict(), run.weights()
    run.backward()
    if not late:
        assert len(run.sender._in_flight) == (1 if comm.rank == 1 else run.most)
    if act == "finish":
        run.sync.finish()
        assert equal(before, run.weights())
        assert run.sender._in_flight == []
        return before
    if act == "averaged":
        with run.sync.averaged():
            assert equal(before, run.weights())
    elif act == "state_dict":
        run.sync.state_dict()
    elif act == "load_state_dict":
        run.opt.zero_grad()
        run.sync.load_state_dict(saved)
        run.backward()
    elif act == "a new run":  # the old one is garbage
        run = Run(comm, expression, use=uneven, late=late).load(run)
        gc.collect()
        run.backward()
    elif act == "a second pass" and comm.rank == 2:
        run.backward()
    elif act == "an error" and comm.rank == 2:
        run.opt.zero_grad()
        break_off(run)
        run.opt.zero_grad()
        run.backward()
    run.step()
    run.go(2).sync.finish()
    return run.weights()


ACTS = [
    *[pytest.param(act, marks=pytest.mark.slow) for act in ("finish", "averaged", "state_dict")],
    *["load_state_dict", "a new run", "a second pass", "an error"],
]


@pytest.mark.few(1)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("expression", ONE_FAST[:3])
def test_between_a_pass_and_its_step(pool: Pool, expression: str, act: str) -> None:
    expected = offbeat.simulate(lambda comm: between(comm, expression, act, True), 3)[0]
    alike(lambda comm: between(comm, expression, act), expected)
    for weights in pool.run(between, expression, act, workers=3):
        assert equal(weights, expected)


# Checkpoints.


@pytest.mark.few(1)
@pytest.mark.parametrize("between", [False, True], ids=["after a step", "after a pass"])
@pytest.mark.parametrize("expression", ONE_FAST)
def test_exact_resume(expression: str, between: bool) -> None:
    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        first = Run(comm, expression).go(2)
        if between:
            first.backward()
        again = Run(comm, expression).load(first)
        first.sync.finish()
        return again.go(2).weights()

    alike(worker, plain(expression))


@pytest.mark.slow
def test_loading_while_buckets_are_in_flight() -> None:
    expression = METHODS[2]

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        first = Run(comm, expression).go(2)
        other = Run(comm, expression).go(3)
        other.backward()
        other.opt.zero_grad()
        return other.load(first).go(2).weights()

    alike(worker, plain(expression))


def test_a_checkpoint_of_other_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        state = Run(comm).go(1).sync.state_dict()
        run = Run(comm)
        state["parts"][0]["states"]["reduce"]["lengths"] = [3, 1]
        run.sync.load_state_dict(state)

    sentence = (
        "The checkpoint has other buckets of gradients than this run: its model has other sizes, or another "
        "version of Offbeat saved it."
    )
    with says(offbeat.CheckpointMismatch, sentence):
        offbeat.simulate(worker, 1)


# Errors, and the end.


def test_a_pass_that_is_not_finite_does_no_harm_if_its_step_is_left_out() -> None:
    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm, METHODS[2]).go(2)
        run.backward(float("nan"))
        run.opt.zero_grad()
        return run.go(2).weights()

    alike(worker, plain(METHODS[2]))


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        run = Run(comm, METHODS[1]).go(2)
        run.backward(float("inf") if comm.rank == 1 else 1.0)
        run.step()

    with pytest.raises(offbeat.NotFinite, match=r"Round 2 \(step 3\): 'layers.3' on rank 1 has a value"):
        offbeat.simulate(worker, 2)


def apart(comm: offbeat.Communicator, expression: str) -> None:
    run = Run(comm, expression).go(2)
    run.backward()
    if comm.rank == 0:
        run.step()
    else:
        run.sync.finish()


@pytest.mark.parametrize("expression", ONE_FAST[:3])
def test_workers_that_are_apart(pool: Pool, expression: str) -> None:
    for error in pool.attempt(apart, expression, workers=2):
        assert isinstance(error, offbeat.Disagreement)
        assert "rank 0 is in round 2 at step 3, rank 1 in finish() at step 2" in str(error)


def lost(comm: offbeat.Communicator, expression: str, late: bool) -> Exception | None:
    """Rank 1 leaves before a pass, or after it."""
    run = Run(comm, expression, use=uneven).go(2)
    try:
        with run.sync:
            if comm.rank == 1 and not late:
                raise Broken
            run.backward()
            if comm.rank == 1:
                raise Broken
            run.step()
    except Exception as error:
        error.__cause__ = error.__context__ = None
        return error
    return None


@pytest.mark.parametrize("late", [False, True], ids=["before a pass", "after a pass"])
@pytest.mark.parametrize("expression", ONE_FAST[:3])
def test_a_lost_worker_is_named_at_the_step(pool: Pool, expression: str, late: bool) -> None:
    simulated = offbeat.simulate(lambda comm: lost(comm, expression, late), 2)
    for first, second in (simulated, pool.attempt(lost, expression, late, workers=2)):
        assert isinstance(second, Broken)
        assert isinstance(first, offbeat.PeerLost)
        assert "Round 2 (step 3)" in str(first)
        assert "rank 1" in str(first).lower()


def test_hooks_end_with_the_run() -> None:
    def hooks(net: Layers) -> int:
        return sum(len(p._post_accumulate_grad_hooks or {}) for p in net.parameters())

    def worker(comm: offbeat.Communicator) -> list[int]:
        run = Run(comm).go(2)
        net, counts = run.net, [hooks(run.net)]
        run.sync.finish()
        counts.append(hooks(net))
        run = Run(comm)
        net, counts = run.net, [*counts, hooks(run.net)]
        del run
        gc.collect()
        return [*counts, hooks(net)]

    assert offbeat.simulate(worker, 2) == [[4, 0, 4, 0]] * 2


# Sizes and seconds.


@pytest.mark.parametrize(
    ("sizes", "lengths", "coded"),
    [
        ([], [0], [0]),
        ([1, 1], [2], [2]),
        ([2**18], [1], [1]),
        ([2**16 - 1, 1, 1], [2, 1], [2, 1]),
        ([2**18] * 4, [1, 2, 1], [1, 1, 1, 1]),
        ([2**17] * 4, [1, 2, 1], [1, 2, 1]),
        ([2**20] * 16, [2, 8, 6], [1, 2, 2, 2, 2, 2, 2, 2, 1]),
        ([2**23] * 16, [1, 4, 4, 4, 3], [1, 2, 2, 2, 2, 2, 2, 2, 1]),
        ([2**28] * 2, [1, 1], [1, 1]),
    ],
)
def test_the_sizes_of_buckets(sizes: list[int], lengths: list[int], coded: list[int]) -> None:
    """Half of the model, or an eighth with a code, but 256 kB at least and 25 MB at most; for the first, a
    quarter of that."""
    assert cut_sizes(sizes, offbeat.Mean()) == lengths
    assert cut_sizes(sizes, offbeat.Quantized(4)) == coded


class NotedWorker(Worker):
    """Notes which of its duplicates sends a message, and when the message is waited for."""

    def __init__(self, comm: offbeat.Communicator, log: list[str]) -> None:
        self.comm, self.log, self.made = comm, log, 0

    def duplicate(self) -> offbeat.Communicator:
        self.made += 1
        number, log = self.made, self.log

        class Noted(offbeat.Metered):
            sends = 0

            def run(self, kind: Any, *given: Any, **options: Any) -> Any:
                self.sends += 1
                name = f"{kind.name} {self.sends} on {number}"
                log.append(f"send {name}")
                message = super().run(kind, *given, **options)
                return message.then(lambda got: (log.append(f"got {name}"), got)[1])

        return Noted(self.comm.worker.duplicate())

    def task_queue(self) -> Any:
        return self.comm.worker.task_queue()

    def leave(self, departure: Any) -> None:
        raise AssertionError("no worker of this test leaves")

    sidecar = leave  # type: ignore[assignment]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_order_of_messages_in_a_pipeline(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message takes a second. With two threads no bucket waits for another, and each has its connections.

    With one, the mean of a bucket has arrived when the messages of the next one are sent.
    """
    monkeypatch.setattr(pipelines, "count_threads", lambda part: threads)

    def worker(comm: offbeat.Communicator) -> tuple[list[str], list[Tensor]]:
        log, state = list[str](), {"residual": None, "factor": 1.0, "code": {}}
        pipeline = pipelines.Pipeline(offbeat.Quantized(4), NotedWorker(comm, log))
        parts = [Packed.like({"x": torch.empty(4096)}) for _ in range(3)]
        for part in parts:
            part.read([torch.full((4096,), 1.0 + comm.rank)])
        sent = [
            pipeline.send(part, offbeat.Clock(1, 0, 0.1), state, last=part is parts[-1]) for part in parts
        ]
        for message in sent:
            message.wait()
        pipeline.close(wait=True)
        return log, [part.views[0] for part in parts]

    for log, means in offbeat.simulate(worker, 2, network=offbeat.Network(latency=1.0)):
        assert all(torch.equal(mean, torch.full((4096,), 1.5)) for mean in means)
        if threads == 2:
            orders = "send exchange 1 on 1, send exchange 2 on 1, send exchange 3 on 1, got exchange 1 on 1"
            orders += ", send gather 1 on 2, got exchange 2 on 1, send gather 2 on 2, got exchange 3 on 1"
            orders += ", send gather 3 on 2, got gather 1 on 2, got gather 2 on 2, got gather 3 on 2"
        else:
            orders = "send exchange 1 on 1, got exchange 1 on 1, send gather 2 on 1, send exchange 3 on 1"
            orders += ", got exchange 3 on 1, send gather 4 on 1, got gather 2 on 1, send exchange 5 on 1"
            orders += ", got exchange 5 on 1, send gather 6 on 1, got gather 4 on 1, got gather 6 on 1"
        assert ", ".join(log) == orders


def test_seconds_by_hand() -> None:
    """Buckets of 256, 512 and 256 kB at 1 MB/s, and compute of 3 s: they take 0.25, 0.5 and 0.25 s.

    They leave at 1.5, 2.5 and 3.0. All but the last have arrived when the next one leaves.
    """

    def worker(comm: offbeat.Communicator) -> list[tuple[float, float]]:
        sync = Run(comm).go(3).sync
        return [(report.seconds_waited, report.seconds_in_air) for report in sync.reports]

    network = offbeat.Network(bandwidth=2.0**20)
    first, *others = offbeat.simulate(worker, 2, network=network, compute=Constant(3.0))[0]
    assert first == pytest.approx((1.0, 1.0), abs=1e-3)
    for waited, in_air in others:
        assert (waited, in_air) == (pytest.approx(0.25, abs=1e-3), pytest.approx(1.75, abs=1e-3))


def test_seconds_of_a_code_by_hand() -> None:
    """Two messages for each of four buckets, which take 2 s each, whatever their size; compute of 3 s.

    The first ones leave at 1.5, 2.0, 2.5 and 3.0, and the second ones 2 s later. Nothing else is waited for.
    The last one arrives 4 s after the step.
    """

    def worker(comm: offbeat.Communicator) -> list[tuple[float, float]]:
        sync = Run(comm, "ddp(reduce=Mean('bfloat16'))").go(3).sync
        return [(report.seconds_waited, report.seconds_in_air) for report in sync.reports]

    for network in (offbeat.Network(latency=2.0), offbeat.Network(latency=2.0, bandwidth=1e9)):
        first, *others = offbeat.simulate(worker, 2, network=network, compute=Constant(3.0))[0]
        assert first == pytest.approx((4.0, 4.0), abs=0.01)
        for waited, in_air in others:
            assert (waited, in_air) == (pytest.approx(4.0, abs=0.01), pytest.approx(5.5, abs=0.01))


def test_a_reducer_of_buckets_cannot_split_its_communicator() -> None:
    class Halves(offbeat.Mean):
        def start(self, payload: Any, comm: Any, *given: Any) -> Any:
            return super().start(payload, comm.split([[0, 1], [2, 3]]), *given)

    def worker(comm: offbeat.Communicator, reduce: offbeat.Reducer) -> list[Tensor]:
        net = Layers()
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        sync = offbeat.ddp(net, opt, reduce=reduce, group=comm)
        net([1.0 + comm.rank] * 4).backward()
        sync.step()
        return [layer.detach() for layer in net.layers]

    with pytest.raises(RuntimeError, match="cannot split its communicator: set its attribute `splits`"):
        offbeat.simulate(lambda comm: worker(comm, Halves("bfloat16")), 4)
    Halves.splits = False
    found = offbeat.simulate(lambda comm: worker(comm, Halves("bfloat16")), 4)
    assert [weights[0][0].item() for weights in found] == [1.5 / 4, 1.5 / 4, 3.5 / 4, 3.5 / 4]


def test_bytes_by_hand() -> None:
    """Of two workers each sends its 4 layers, 4 notes and 8 words, early or late."""
    for late in (False, True):
        runs = offbeat.simulate(lambda comm, late=late: Run(comm, late=late).go(2).sync.reports, 2)
        assert [report.bytes_sent for report in runs[0]] == [4 * 4 * WIDTH + 4 * 4 + 8 * 8] * 2


@pytest.mark.parametrize("expression", METHODS[:2])
def test_bytes_of_buckets_that_are_dropped(expression: str) -> None:
    """They left for a step that never came. The totals have them, as if the step had come."""

    def worker(comm: offbeat.Communicator, late: bool) -> int:
        run = Run(comm, expression, late=late).go(2)
        run.backward()
        run.sync.finish()
        round = run.sync.reports[1].bytes_sent - 8 * 8  # without its header
        return run.sync.totals.bytes_sent - round * (not late)

    early, late = (
        offbeat.simulate(lambda comm, late=late: worker(comm, late), 2)[0] for late in (False, True)
    )
    assert early == late


# A mean that is one step old.


def quadratic(lr: float, momentum: float, delay: int, steps: int) -> list[float]:
    """The weight of two workers whose mean loss is x²/2, from 1."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        net = nn.ParameterList([torch.ones(1, dtype=torch.float64)])
        opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
        sync, trace = offbeat.ddp(net, opt, delay=delay, group=comm), [1.0]
        for _ in range(steps):
            ((net[0] + comm.rank - 0.5).square().sum() / 2).backward()
            sync.step()
            opt.zero_grad()
            trace.append(net[0].item())
        sync.finish()
        return [*trace, net[0].item()]

    first, second = offbeat.simulate(worker, 2)
    assert first == second
    assert first[-1] == first[-2]  # finish() drops the last mean
    return first[:-1]


def test_a_late_gradient_in_numbers() -> None:
    """x ← x − y/4, where y is the weight before: the roots of z² − z + 1/4 are both 1/2; x = (n + 1)/2ⁿ."""
    assert quadratic(0.25, 0.0, 1, 12) == [(n + 1) / 2**n for n in range(13)]


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 0.9])
def test_the_largest_stable_rate(momentum: float) -> None:
    """The roots of z² − (1 + β)z + β + lr·λ are inside the unit circle if lr·λ < 1 − β."""
    for delay, limit in ((1, 1 - momentum), (0, 2 + 2 * momentum)):
        for factor, stable in ((0.95, True), (1.05, False)):
            trace = quadratic(factor * limit, momentum, delay, 200)
            largest = [max(map(abs, trace[i : i + 50])) for i in (50, 150)]
            assert (largest[1] < largest[0]) == stable


@pytest.mark.parametrize("expression", ONE_FAST)
def test_exact_resume_with_a_delay(expression: str) -> None:
    late = expression.replace("ddp(", "ddp(delay=1, ").replace(", )", ")")

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        first = Run(comm, late).go(2)
        again = Run(comm, late).load(first)
        first.sync.finish()
        return again.go(2).weights()

    alike(worker, offbeat.simulate(lambda comm: Run(comm, late).go(4).weights(), 3)[0])


def test_a_delay_is_hidden_with_any_code() -> None:
    """Messages of 0.3 s have a step of 1 s to arrive, also those that a code sends one after the other."""

    def worker(comm: offbeat.Communicator, expression: str) -> float:
        run = Run(comm, expression).go(4)
        return max(report.seconds_waited for report in run.sync.reports)

    network = offbeat.Network(bandwidth=2.0**22, latency=0.01)
    for code in ("Mean()", *CODES):
        waits = offbeat.simulate(
            lambda comm, code=code: worker(comm, f"ddp(delay=1, reduce={code})"),
            2,
            network=network,
            compute=Constant(1.0),
        )
        assert waits == [0.0, 0.0]


@pytest.mark.parametrize("delay", [2, -1, 1.5])
def test_a_delay_that_is_none(delay: Any) -> None:
    net = Layers()
    with pytest.raises((TypeError, ValueError), match="delay"):
        offbeat.ddp(net, torch.optim.SGD(net.parameters(), lr=0.5), delay=delay)


# What users put into a training loop.


def test_a_scale_that_changes() -> None:
    """Scaled gradients are averaged, and unscaled after that. A scale of a power of two changes no bit."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run, scaler = Run(comm), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for step in range(4):
            slopes = [slope(comm.rank, step, layer) for layer in range(4)]
            scaler.scale(run.net(slopes)).backward()
            run.step(local=lambda: (scaler.unscale_(run.opt), scaler.step(run.opt), scaler.update()))
        assert (run.left, scaler.get_scale()) == ([0, 2, 2, 2], 64.0)
        return run.weights()

    alike(worker, plain())


def overflow(comm: offbeat.Communicator) -> tuple[list[Tensor], list[float]]:
    """The second of five gradients overflows on rank 1."""
    run, scaler = Run(comm, "ddp(delay=1)"), torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for step in range(5):
        big = 3e38 if (comm.rank, step) == (1, 1) else 1.0
        slopes = [big * slope(comm.rank, step, layer) for layer in range(4)]
        scaler.scale(run.net(slopes)).backward()
        run.step(local=lambda: (scaler.step(run.opt), scaler.update()))
        scales.append(scaler.get_scale())
    run.sync.finish()
    return run.weights(), scales


def test_an_overflow_with_a_delay(pool: Pool) -> None:
    """It reaches all workers one step later. They skip that step together, and halve their scales.

    The gradient of that step was scaled by 4 and is unscaled by 2, so it counts twice: with the means g of
    five steps, x = −½(g₀ + 2g₂ + g₃). Nothing lands in the first step; the last mean is dropped.
    """
    spread = Layers().spread
    for results in (offbeat.simulate(overflow, 2), pool.run(overflow, workers=2)):
        for weights, scales in results:
            assert scales == [4.0, 4.0, 2.0, 2.0, 2.0]
            for layer, own in enumerate(weights):
                g = [(slope(0, step, layer) + slope(1, step, layer)) / 2 for step in range(5)]
                assert torch.equal(own, -0.5 * (g[0] + 2 * g[2] + g[3]) * spread)


def test_several_optimizers_and_clipping_inside_the_step() -> None:
    def worker(comm: offbeat.Communicator, late: bool) -> list[Tensor]:
        net = Layers()
        opts = [torch.optim.SGD([p], lr=0.5 / (1 + i)) for i, p in enumerate(net.parameters())]
        sync = offbeat.ddp(net, opts, group=comm)

        def local() -> None:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for opt in opts:
                opt.step()

        for step in range(3):
            with sync.accumulate() if late else torch.enable_grad():
                net([slope(comm.rank, step, layer) for layer in range(4)]).backward()
            sync.step(local)
            net.zero_grad()
        assert sync.parts[0].sender._times == 0
        return [layer.detach() for layer in net.layers]

    expected = offbeat.simulate(lambda comm: worker(comm, True), 3)[0]
    alike(lambda comm: worker(comm, False), expected)


def train_squares(net: nn.Module, sync: offbeat.Synchronizer, opt: Any, rank: int, change: str) -> int:
    """Three steps, the last one with a change after the pass. Return the buckets that left early there."""
    left = 0
    for step in range(3):
        data = torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + rank))
        net(data).square().mean().backward()
        if change == "a second pass" and step == 2:
            net(data).square().mean().mul(-2).backward()  # turns all signs, and keeps the norm
        if change == "scaled" and step == 2:
            torch._foreach_mul_([p.grad for p in net.parameters()], 3.0)
        left = len(sync.parts[0].sender._in_flight)
        sync.step()
        opt.zero_grad()
    return left


def replicas_of_shards(comm: offbeat.Communicator, change: str) -> tuple[list[Tensor], int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    for layer in net:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = offbeat.ddp(net, opt, group=mesh["replica"])
    left = train_squares(net, sync, opt, mesh["replica"].get_local_rank(), change)
    sync.finish()
    return [p.full_tensor().detach() for p in net.parameters()], left, sync.parts[0].sender._times


def whole_replicas(comm: offbeat.Communicator, change: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.ddp(net, opt, group=comm) as sync:
        train_squares(net, sync, opt, comm.rank, change)
    return [p.detach() for p in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["", "a second pass", "scaled"])
def test_replicas_of_shards(pool: Pool, change: str) -> None:
    """A gradient that changes after its bucket has left is sent again, also one that is sharded."""
    expected = offbeat.simulate(lambda comm: whole_replicas(comm, change), 2)[0]
    for weights, left, times in pool.run(replicas_of_shards, change):
        assert (left, times) == (2, 1 if change else 0)  # of three buckets
        for mine, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    """All gradients of a compiled pass come at its end: the buckets still leave before the step."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        run = Run(comm)
        compiled = torch.compile(run.net, backend="aot_eager")
        for step in range(4):
            compiled([slope(comm.rank, step, layer) for layer in range(4)]).backward()
            run.step()
        assert run.left == [0, 2, 2, 2]
        return run.weights()

    alike(worker, plain())
