"""The driver: what it promises around the local step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Dyadic, optimizer_for, same, snapshot
from sentences import says
from table import METHODS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat import (
    Communicator,
    Correct,
    Every,
    Exchange,
    Part,
    Replace,
    Solo,
    Synchronizer,
    World,
    params,
    simulate,
)
from offbeat.engine.agreement import checksum


class Transport(nn.Module):
    """Two numbers that move by 1, 3, 5, … at every step of rank 0, 1, 2, …; a floating and a whole buffer."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((2,), start))
        self.register_buffer("smooth", torch.full((1,), start))
        self.register_buffer("count", torch.tensor(int(start)))


def sgd(model: nn.Module, **options: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 1.0, **options})


def push(model: Transport, rank: int) -> None:
    """The gradient that moves it."""
    model.x.grad = torch.full((2,), -(2.0 * rank + 1))


def line(comm: Communicator, expression: str, **options: float) -> tuple[Transport, Synchronizer]:
    model = Transport()
    return model, offbeat.method(expression)(model, sgd(model, **options), group=comm)


def go(model: Transport, sync: Synchronizer, comm: Communicator, steps: int) -> None:
    for _ in range(steps):
        push(model, comm.rank)
        sync.step()


# The start.


def test_everyone_starts_from_rank_0() -> None:
    """Weights and buffers of all kinds, at the first step and not at construction."""

    class Mixed(Transport):
        def __init__(self, start: float) -> None:
            super().__init__(start)
            self.register_buffer("mask", torch.tensor([start > 0, start == 0]))

    def worker(comm: Communicator) -> list[list[Any]]:
        model = Mixed(5.0 * comm.rank)
        sync = offbeat.local_sgd(model, sgd(model), group=comm)
        before = [t.tolist() for t in (model.x, model.smooth, model.count, model.mask)]
        sync.step(lambda: None)
        return [before, [t.tolist() for t in (model.x, model.smooth, model.count, model.mask)]]

    zero = [[0.0, 0.0], [0.0], 0, [False, True]]
    assert simulate(worker, 2) == [[zero, zero], [[[5.0, 5.0], [5.0], 5, [True, False]], zero]]


@pytest.mark.parametrize("begin", ["averaged", "finish"])
def test_the_start_may_come_without_a_step(begin: str) -> None:
    def worker(comm: Communicator) -> list[float]:
        model = Transport(5.0 * comm.rank + 1)
        sync = offbeat.local_sgd(model, sgd(model), group=comm)
        if begin == "averaged":
            with sync.averaged():
                pass
        else:
            sync.finish()
        return model.x.tolist()

    assert simulate(worker, 2) == [[1.0, 1.0]] * 2


# averaged()


def test_averaged_shows_the_mean_and_gives_all_back() -> None:
    def worker(comm: Communicator) -> None:
        model, sync = line(comm, "local_sgd(every=8)")
        go(model, sync, comm, 2)
        model.smooth.fill_(comm.rank)
        model.count.fill_(10 + comm.rank)
        before = snapshot(model)
        with sync.averaged():
            assert model.x.tolist() == [4.0, 4.0]  # of 2 and 6
            assert model.smooth.item() == 0.5
            assert model.count.item() == 10 + comm.rank
        assert same(snapshot(model), before)
        assert model.x.tolist() == [[2.0, 2.0], [6.0, 6.0]][comm.rank]

    simulate(worker, 2)


@pytest.mark.parametrize("training", [True, False])
def test_averaged_restores_after_an_exception(training: bool) -> None:
    """Whatever was done to weights and buffers inside; and the mode is the caller's business."""

    def worker(comm: Communicator) -> None:
        model, sync = line(comm, "local_sgd(every=8)")
        go(model, sync, comm, 2)
        with torch.no_grad():
            model.x[0] = math.nan if comm.rank else 1e-45  # to the bit, whatever the bits are
            model.x[1] = -0.0
        bits = model.x.detach().view(torch.int32).tolist()
        place = model.x.data_ptr()
        model.train(training)
        with says(KeyError, "'inside'"), sync.averaged():
            assert model.training == training
            with torch.no_grad():
                model.x.zero_()
            model.smooth.fill_(7)
            model.count.fill_(7)
            model.train(not training)
            raise KeyError("inside")
        assert model.training == (not training)
        assert model.x.detach().view(torch.int32).tolist() == bits
        assert model.x.data_ptr() == place
        assert (model.smooth.item(), model.count.item()) == (0.0, 0)
        go(model, sync, comm, 1)  # and it goes on
        with sync.averaged():
            pass

    simulate(worker, 2)


@pytest.mark.parametrize(
    ("expression", "steps", "tensors"),
    [
        ("ddp()", 3, 0),
        ("local_sgd(every=2)", 4, 0),
        ("local_sgd(every=2)", 3, 8),
        ("local_sgd(every=2)", 0, 0),
        ("local_sgd(every=2, delay=1)", 3, 8),  # landed, but the workers have gone their own ways since
        ("local_sgd(every=2, buffers='keep')", 4, 0),
        ("post_local_sgd(switch=3, every=2)", 3, 0),
        ("post_local_sgd(switch=3, every=2)", 4, 8),
        ("post_local_sgd(switch=3, every=2)", 5, 0),
        ("hierarchical(nodes=1, inner=1, outer=2)", 2, 0),
        ("hierarchical(nodes=1, inner=1, outer=2)", 3, 8),
        ("hierarchical(nodes=2, inner=1, outer=2)", 3, 0),  # one node is everyone
    ],
)
def test_equal_replicas_send_no_tensors(expression: str, steps: int, tensors: int) -> None:
    """Both averaged() and finish() send a header of 64 bytes per communicator, and 64 bytes of checksums.
    They average x, 8 bytes, only if it differs. The floating buffer is the same everywhere."""

    def worker(comm: Communicator) -> None:
        model, sync = line(comm, expression)
        with sync.averaged():
            pass
        go(model, sync, comm, steps)
        header = 128 if "nodes=2" in expression else 64  # a node of one hands nothing to the network
        before = sync.totals.bytes_sent
        with sync.averaged():
            pass
        looked = sync.totals.bytes_sent
        assert looked - before == header + 64 + tensors
        sync.finish()
        assert sync.totals.bytes_sent - looked == header + 64 + tensors
        assert sync.totals.bytes_received == sync.totals.bytes_sent
        done = sync.totals.bytes_sent
        with sync.averaged():
            assert len(set(model.x.tolist())) == 1
        assert sync.totals.bytes_sent == done

    simulate(worker, 2)


def test_only_what_differs_is_averaged() -> None:
    """Weights or floating buffers that are equal keep every bit; a third of x + x + x would not."""

    def worker(comm: Communicator, name: str) -> None:
        model, sync = line(comm, "local_sgd(every=100)")
        go(model, sync, comm, 0)
        with sync.averaged():
            pass  # all begin with the same weights
        odd = torch.tensor([0.1 + 1e-7, 0.7])
        with torch.no_grad():
            model.x.copy_(odd)
            model.smooth.copy_(odd[:1])
            getattr(model, name).add_(float(comm.rank))
        before = sync.totals.bytes_sent
        sync.finish()
        mean = 8 if name == "x" else 4
        assert sync.totals.bytes_sent - before == 128 * 2 + round(mean * 4 / 3)
        other = model.smooth if name == "x" else model.x
        assert torch.equal(other, odd[: len(other)])
        assert getattr(model, name).tolist() == pytest.approx((odd + 1)[: mean // 4].tolist())

    for name in ("x", "smooth"):
        simulate(lambda comm, name=name: worker(comm, name), 3)


def test_the_checksum_sees_every_bit_and_its_position() -> None:
    x = torch.randn(3, 70_001)
    swapped = x.clone()
    swapped[0, 5], swapped[2, 9] = x[2, 9], x[0, 5]
    nudged = x.clone()
    nudged[1, 40_000] = torch.nextafter(x[1, 40_000], torch.tensor(9.0))
    others = [swapped, nudged, -x, x.double(), x.bfloat16(), x.roll(1, 0), x.roll(2**15, 1)]
    found = [checksum([t]) for t in [x, *others]]
    assert len(set(found)) == len(found)
    assert checksum([x.t().contiguous().t()]) == found[0]
    a, b = x[0], x[1]
    assert checksum([a, b]) != checksum([b, a])
    assert all(-(2**63) <= number < 2**63 for number in found)
    assert checksum([]) == checksum([torch.zeros(0)]) == 0


CLOSED = "this run was ended by finish(): make a new synchronizer."
NOT_LIVE = "leave averaged() first: inside, the model has other weights."


def test_all_start_with_the_weights_of_rank_0() -> None:
    def worker(comm: Communicator) -> list[dict[str, torch.Tensor]]:
        net = Dyadic(comm.rank)
        sync = offbeat.local_sgd(net, optimizer_for(net), every=2, group=comm)
        before = snapshot(net)
        sync.start()
        sync.start()  # once is enough
        return [before, snapshot(net)]

    (own, first), (other, second) = offbeat.simulate(worker, 2)
    assert not same(own, other)
    assert same(own, first)
    assert same(own, second)


def test_what_is_not_done_inside_averaged() -> None:
    _, sync = line(Solo(), "local_sgd(every=2)")
    state = sync.state_dict()
    with sync.averaged():
        with says(RuntimeError, f"averaged(): {NOT_LIVE}"), sync.averaged():
            pass
        for name, call in {
            "start()": sync.start,
            "step()": sync.step,
            "before_step()": sync.before_step,
            "finish()": sync.finish,
            "load_state_dict()": lambda: sync.load_state_dict(state),
        }.items():
            with says(RuntimeError, f"{name}: {NOT_LIVE}"):
                call()
        sentence = f"state_dict(): {NOT_LIVE}"
        with says(RuntimeError, sentence):
            sync.state_dict()
    sync.step()
    assert sync.steps == 1
    with sync.averaged():
        pass


def test_what_is_not_done_inside_a_step() -> None:
    _, sync = line(Solo(), "local_sgd(every=2)")
    with says(RuntimeError, "after_step(): call before_step() first."):
        sync.after_step()
    assert sync.before_step() is True
    with says(RuntimeError, "before_step(): a step is under way: call after_step() first."):
        sync.before_step()
    with says(RuntimeError, "averaged(): a step is under way: call after_step() first."), sync.averaged():
        pass
    with says(RuntimeError, "finish(): a step is under way: call after_step() first."):
        sync.finish()
    sentence = "state_dict(): a step is under way: call after_step() first."
    with says(RuntimeError, sentence):
        sync.state_dict()
    assert sync.steps == 0
    sync.after_step()
    assert sync.steps == 1
    with says(RuntimeError, "after_step(): call before_step() first."):
        sync.after_step()
    sync.finish()


# finish() and with


def test_finish_lands_what_is_in_flight() -> None:
    """Sent after step 2: 2 and 6, correction ±2; at step 3 x is 3 and 9, landed 5 and 7; the mean is 6."""

    def worker(comm: Communicator) -> list[float]:
        model, sync = line(comm, "local_sgd(every=2, delay=2)")
        go(model, sync, comm, 3)
        assert sync.reports == []
        model.smooth.fill_(comm.rank)
        sync.finish()
        assert [report.step for report in sync.reports] == [2]
        assert sync.finished
        return [*model.x.tolist(), model.smooth.item()]

    assert simulate(worker, 2) == [[6.0, 6.0, 0.5]] * 2


def test_finish_twice_is_finish_once() -> None:
    def worker(comm: Communicator) -> None:
        model, sync = line(comm, "local_sgd(every=2)")
        go(model, sync, comm, 3)
        sync.finish()
        with torch.no_grad():
            model.x.add_(comm.rank)
        totals = sync.totals.bytes_sent
        if comm.rank == 0:
            sync.finish()  # no longer a matter of all
        assert model.x[0].item() == 6.0 + comm.rank  # the mean of 5 and 7
        assert sync.totals.bytes_sent == totals
        for name, call in {
            "step()": sync.step,
            "before_step()": sync.before_step,
            "load_state_dict()": lambda: sync.load_state_dict({}),
        }.items():
            with says(RuntimeError, f"{name.strip()}: {CLOSED}"):
                call()
        assert sync.steps == 3

    simulate(worker, 2)


def test_leaving_the_block_finishes() -> None:
    def worker(comm: Communicator) -> float:
        model = Transport()
        with offbeat.local_sgd(model, sgd(model), every=8, group=comm) as sync:
            assert isinstance(sync, Synchronizer)
            go(model, sync, comm, 1)
        assert sync.finished
        return model.x[0].item()

    assert simulate(worker, 2) == [2.0, 2.0]


def test_leaving_the_block_by_an_exception_tells_the_others() -> None:
    said = {}

    def worker(comm: Communicator) -> None:
        model = Transport()
        try:
            with offbeat.local_sgd(model, sgd(model), every=8, group=comm) as sync:
                go(model, sync, comm, 1)
                if comm.rank == 1:
                    raise ZeroDivisionError("no data")
        except Exception as error:
            said[comm.rank] = f"{type(error).__name__}: {error}"
        assert not sync.finished

    simulate(worker, 2)
    lost = "Waiting for the gather of int64[8]: rank 1 failed (ZeroDivisionError: no data)."
    assert said == {0: f"PeerLost: {lost}", 1: "ZeroDivisionError: no data"}


# step()


def test_step_returns_what_local_returns_and_calls_it_once() -> None:
    model, sync = line(Solo(), "local_sgd(every=2)")
    calls = []

    def local() -> str:
        calls.append(sync.steps)
        return "the loss"

    push(model, 0)
    assert sync.step(local) == "the loss"
    assert calls == [0]
    assert model.x.tolist() == [0.0, 0.0]  # the optimizer steps only if local does it
    assert sync.step() is None
    assert model.x.tolist() == [1.0, 1.0]
    assert sync.steps == 2


def test_a_local_step_that_was_skipped_on_one_rank_counts() -> None:
    """As a gradient scaler does on the rank that saw an inf."""

    def worker(comm: Communicator) -> list[float]:
        model, sync = line(comm, "local_sgd(every=2)")
        trace = []
        for step in range(4):
            push(model, comm.rank)
            skip = comm.rank == 1 and step == 0
            sync.step((lambda: None) if skip else None)
            trace.append(model.x[0].item())
        return trace

    # 1, 2 and 0, 3: mean 2.5; then 3.5, 4.5 and 5.5, 8.5: mean 6.5.
    assert simulate(worker, 2) == [[1, 2.5, 3.5, 6.5], [0, 2.5, 5.5, 6.5]]


def test_an_error_in_the_local_step_is_told() -> None:
    said = {}

    def worker(comm: Communicator) -> None:
        _, sync = line(comm, "local_sgd(every=2)")

        def local() -> None:
            if comm.rank == 1:
                raise ZeroDivisionError("no data")

        try:
            for _ in range(2):
                sync.step(local)
        except Exception as error:
            said[comm.rank] = f"{type(error).__name__}: {error}"

    simulate(worker, 2)
    assert said[1] == "ZeroDivisionError: no data"
    assert said[0].endswith("rank 1 failed (ZeroDivisionError: no data).")


class Holding(Part):
    """Makes the step itself: adds 10."""

    def __init__(self, model: Transport, hold: bool = True) -> None:
        self.model, self.peers, self.hold, self.clocks = model, World(Solo()), hold, []

    def before(self, clock: offbeat.Clock) -> bool:
        self.clocks.append(("before", clock.step, clock.lr))
        return not self.hold

    def after(self, clock: offbeat.Clock) -> None:
        self.clocks.append(("after", clock.step, clock.lr))
        with torch.no_grad():
            self.model.x.add_(10)


def test_a_part_may_make_the_step() -> None:
    model = Transport()
    optimizer = sgd(model)
    other = sgd(model)
    part = Holding(model)
    sync = Synchronizer([optimizer, other], [Holding(model, hold=False), part])
    called = []

    def local() -> int:
        called.append(optimizer.step())
        called.append(other.step(lambda: 1.0))
        called.append(optimizer.step(closure=None))
        return 5

    ours = optimizer.step
    push(model, 0)
    assert sync.step(local) == 5
    assert called == [None, 1.0, None]  # a closure is called, as the optimizer would
    assert model.x.tolist() == [20.0, 20.0]  # no gradient came in
    assert optimizer.step == ours
    assert "step" not in vars(optimizer)
    optimizer.step()
    assert model.x.tolist() == [21.0, 21.0]
    assert sync.before_step() is False
    sync.after_step()
    assert part.clocks == [("before", 0, 1.0), ("after", 1, 1.0), ("before", 1, 1.0), ("after", 2, 1.0)]
    part.hold = False
    sync.step()
    assert model.x.tolist() == [63.0, 63.0]  # twice 10 from each part, and both optimizers' steps


def test_the_optimizer_is_free_again_after_an_error() -> None:
    model = Transport()
    optimizer = sgd(model)
    sync = Synchronizer(optimizer, [Holding(model)])

    def local() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sync.step(local)
    push(model, 0)
    optimizer.step()
    assert model.x.tolist() == [1.0, 1.0]


def test_schedulers_see_a_step_that_a_part_makes() -> None:
    """Or else they warn that they were called before the optimizer."""
    model = Transport()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    part = Holding(model)
    sync = Synchronizer(optimizer, [part])
    for _ in range(2):
        sync.step()
        scheduler.step()
    assert [clock for clock in part.clocks if clock[0] == "before"] == [
        ("before", 0, 1.0),
        ("before", 1, 0.5),
    ]
    assert [clock for clock in part.clocks if clock[0] == "after"] == [("after", 1, 1.0), ("after", 2, 0.5)]


def test_several_optimizers() -> None:
    """The rate is the first's, all step, and the moments of all are averaged."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def worker(comm: Communicator) -> list[float]:
        model = Two()
        first = torch.optim.SGD([model.a], lr=1.0, momentum=0.5)
        second = torch.optim.SGD([model.b], lr=2.0, momentum=0.5)  # its rate is its own
        sync = offbeat.local_sgd(model, [first, second], every=1, moments="average", group=comm)
        model.a.grad, model.b.grad = torch.full((2, 1), -(2.0 * comm.rank + 1))
        sync.step()
        buffers = [opt.state[p]["momentum_buffer"].item() for opt, p in ((first, model.a), (second, model.b))]
        return [model.a.item(), model.b.item(), *buffers]

    # a: the mean of 1 and 3. b: of 2·1 and 2·3. Momenta: of −1 and −3.
    assert simulate(worker, 2) == [[2.0, 4.0, -2.0, -2.0]] * 2


def test_rates_of_all_groups_are_compared() -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Linear(1, 1)
        groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.5 + comm.rank}]
        sync = offbeat.ddp(model, torch.optim.SGD(groups), group=comm)
        model(torch.ones(1)).backward()
        sync.step()

    with pytest.raises(offbeat.Disagreement, match="the learning rates of rank 0 and rank 1 differ in a"):
        simulate(worker, 2)


def test_what_is_trained_must_stay_the_same() -> None:
    model = nn.Linear(1, 1)
    sync = offbeat.local_sgd(model, sgd(model))
    model.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="'bias' was frozen after the synchronizer was made: call finish"):
        sync.step()


@pytest.mark.parametrize("expression", ["local_sgd(every=2, delay=1)", "eager_diloco(every=2)"])
def test_a_mask_of_infinities_stays_one(expression: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def worker(comm: Communicator) -> list[float]:
        model = Masked()
        sync = offbeat.method(expression)(model, sgd(model), group=comm)
        for _ in range(5):
            model.weight.grad = torch.ones(2)
            sync.step()
        sync.finish()
        return model.mask.tolist()

    assert simulate(worker, 2) == [[0.0, -torch.inf]] * 2


# What cannot work.


@pytest.mark.parametrize(
    ("build", "kind", "sentence"),
    [
        (lambda m: offbeat.ddp(m, []), ValueError, "optimizer=[]: pass at least one optimizer."),
        (
            lambda m: offbeat.ddp(m, sgd(Transport())),
            ValueError,
            "SGD holds parameters that are not in the model: build it from the model passed here.",
        ),
        (
            lambda m: offbeat.ddp(m, sgd(m, lr=math.nan)),
            ValueError,
            "The learning rate is nan: it must be a finite number; look at its scheduler.",
        ),
        (
            lambda m: Synchronizer(sgd(m), [Holding(m), Holding(Transport())]),
            ValueError,
            "Synchronizer(...): all parts must be of one model.",
        ),
        (
            lambda m: offbeat.local_sgd(m, sgd(m), buffers="mean"),
            ValueError,
            "buffers='mean': choose one of 'average', 'keep', 'follow'.",
        ),
        (
            lambda m: offbeat.local_sgd(m, sgd(m), moments="follow"),
            ValueError,
            "moments='follow': choose one of 'keep', 'average', 'reset'.",
        ),
    ],
)
def test_sentences(build: Callable[[Transport], object], kind: type[Exception], sentence: str) -> None:
    with says(kind, sentence):
        build(Transport())


def test_a_rate_that_becomes_infinite() -> None:
    _, sync = line(Solo(), "local_sgd(every=2)")
    sync.step()
    sync.optimizers[0].param_groups[0]["lr"] = math.inf
    with says(ValueError, "The learning rate is inf: it must be a finite number; look at its scheduler."):
        sync.step()


def test_a_model_in_ddp_is_refused() -> None:
    model = DistributedDataParallel.__new__(DistributedDataParallel)  # a real one needs a process group
    nn.Module.__init__(model)
    model.module = Transport()
    sentence = (
        "The model is wrapped in DistributedDataParallel, which averages gradients at every step: "
        "train the model itself, without the wrapper (in Accelerate, prepare_model(model, "
        "evaluation_mode=True); in transformers, OffbeatTrainer; in Lightning, OffbeatStrategy)."
    )
    with says(TypeError, sentence):
        offbeat.local_sgd(model, sgd(model))


# Reports.


def test_a_report_by_hand() -> None:
    """Two workers, two numbers. After two steps x is 2 and 6, the mean 4: |x − x̄|² = 2·4 on both, the
    drift; the change is √8 long. 8 bytes of x and 4 of the buffer, a header of 64, the drift's 8: all-reduces
    among two send as much as they are given; of the whole buffer that follows rank 0, 8 bytes, half."""

    def worker(comm: Communicator) -> list[offbeat.Report]:
        model, sync = line(comm, "local_sgd(every=Every(2))")
        go(model, sync, comm, 5)
        return sync.reports

    for reports in simulate(worker, 2):
        assert reports == [
            offbeat.Report(
                step=step,
                round=step // 2 - 1,
                workers=2,
                bytes_sent=12 + 64 + 16 + 4,
                bytes_received=12 + 64 + 16 + 4,
                seconds_waited=0.0,
                seconds_in_air=0.0,
                drift=pytest.approx(8.0),
                norm=pytest.approx(math.sqrt(8.0)),
                period=2,
                waited_mean=0.0,
                waited_max=0.0,
            )
            for step in (2, 4)
        ]


def made_of(
    comm: Communicator, *, steps: int = 2, **options: Any
) -> tuple[list[offbeat.Report], Synchronizer, Transport]:
    model = Transport()
    sync = Synchronizer(sgd(model), [Exchange(params(model), among=comm, **{"when": Every(2), **options})])
    go(model, sync, comm, steps)
    return sync.reports, sync, model


def test_drift_and_norm_of_three() -> None:
    """x is 2, 6, 10: the mean 6. |x − x̄|² is 2·16, 0, 2·16: the drift 64/3."""
    reports = simulate(lambda comm: made_of(comm)[0][0], 3)
    assert [report.drift for report in reports] == [pytest.approx(64 / 3)] * 3
    assert [report.norm for report in reports] == pytest.approx([math.sqrt(32), 0.0, math.sqrt(32)])


@pytest.mark.parametrize(
    ("options", "drift", "norm"),
    [
        ({"update": Replace(keep=0.75)}, 8.0, [math.sqrt(8.0) / 4] * 2),
        ({"update": Correct(gain=0.5)}, 8.0, [math.sqrt(8.0) / 2] * 2),
        # A step later x is 3 and 9, the mean of what was sent 4. Replaced: 2·|3 − 4|² = 2, 2·|9 − 4|² = 50.
        ({"update": Replace(), "delay": 1, "steps": 3}, 26.0, [math.sqrt(2.0), math.sqrt(50.0)]),
        # Corrected: by what was sent.
        ({"update": Correct(), "delay": 1, "steps": 3}, 8.0, [math.sqrt(8.0)] * 2),
        ({"drift": False}, None, [None, None]),
    ],
    ids=str,
)
def test_drift_and_norm(options: dict[str, Any], drift: float | None, norm: list[float | None]) -> None:
    reports = simulate(lambda comm: made_of(comm, **options)[0][0], 2)
    assert [report.drift for report in reports] == [pytest.approx(drift)] * 2
    assert [report.norm for report in reports] == [pytest.approx(value) for value in norm]


def test_without_drift_its_bytes_are_spared() -> None:
    reports = simulate(lambda comm: made_of(comm, drift=False)[0][0], 2)
    assert [report.bytes_sent for report in reports] == [12 + 64 + 4] * 2


def test_ddp_measures_no_drift() -> None:
    """8 bytes of gradients, 4 of which exist, 64 of header; of the buffers, 12 bytes, half."""

    def worker(comm: Communicator) -> list[tuple[Any, ...]]:
        model, sync = line(comm, "ddp()")
        go(model, sync, comm, 2)
        return [(r.step, r.round, r.period, r.drift, r.norm, r.bytes_sent) for r in sync.reports]

    assert simulate(worker, 2) == [[(n, n - 1, 1, None, None, 8 + 4 + 64 + 6) for n in (1, 2)]] * 2


def test_a_first_period_may_be_short() -> None:
    reports, _, _ = made_of(Solo(), when=Every(4, offset=1), steps=9)
    assert [(r.step, r.round, r.period) for r in reports] == [(1, 0, 1), (5, 1, 4), (9, 2, 4)]


def test_a_group_reports_its_own() -> None:
    """Nodes {0, 1} and {2, 3}: x is 1, 3 and 5, 7, so that the drift is 2·1 in both."""

    def worker(comm: Communicator) -> list[tuple[Any, ...]]:
        model, sync = line(comm, "hierarchical(nodes=2, inner=1, outer=2)")
        go(model, sync, comm, 2)
        return [(r.step, r.workers, round(r.drift or 0.0, 5)) for r in sync.reports]

    # After step 1 x is 2, 2, 6, 6; after step 2, 3, 5, 11, 13, the mean 8: 25 + 9 + 9 + 25 = 68, /4·2 = 34.
    assert simulate(worker, 4) == [[(1, 2, 2.0), (2, 4, 34.0)]] * 4


def test_totals_add_up() -> None:
    """The start: a word of 64 bytes about the method, x and both buffers, 20 bytes, of which a half, and a
    word of 64 bytes that all are connected. The end: a header, the checksums and the mean of x, 8 bytes: the
    floating buffer is equal."""

    def worker(comm: Communicator) -> None:
        model, sync = line(comm, "local_sgd(every=2)")
        go(model, sync, comm, 1)
        assert (sync.totals.bytes_sent, sync.totals.rounds) == (64 + 10 + 64, 0)
        go(model, sync, comm, 4)
        reports = sync.reports
        sync.finish()
        totals = sync.totals
        assert totals.rounds == len(reports) == 2
        assert totals.bytes_sent == 64 + 10 + 64 + sum(r.bytes_sent for r in reports) + 64 + 64 + 8
        assert totals.bytes_received == totals.bytes_sent
        assert totals.seconds_waited == sum(r.seconds_waited for r in reports)

    simulate(worker, 2)


@pytest.mark.slow
def test_the_last_thousand_reports() -> None:
    told: list[offbeat.Report] = []
    model = Transport()
    part = Exchange(params(model), when=Every(1), among=Solo())
    sync = Synchronizer(sgd(model), [part], on_report=told.append)
    for _ in range(1005):
        sync.step()
    assert len(sync.reports) == 1000
    assert [sync.reports[0].step, sync.reports[-1].step] == [6, 1005]
    assert sync.totals.rounds == 1005
    assert [report.step for report in told] == list(range(1, 1006))
    assert told[5:] == sync.reports
    assert all(report.drift == 0.0 for report in told)


def test_on_report_may_be_set_later() -> None:
    told: list[offbeat.Report] = []
    _, sync = line(Solo(), "ddp()")
    sync.on_report = told.append
    sync.step()
    assert told == sync.reports
    assert len(told) == 1


# What rides along.


def buffers(comm: Communicator, rule: str, delay: int) -> tuple[float, int]:
    """Rank r sends smooth = 4r and count = 10 + 10r; one step later they are 1 more."""
    model = Transport()
    part = Exchange(params(model), when=Every(1), among=comm, buffers=rule, delay=delay)
    sync = Synchronizer(sgd(model), [part])

    def local() -> None:
        if sync.steps == 0:
            model.smooth.fill_(4.0 * comm.rank)
            model.count.fill_(10 + 10 * comm.rank)
        else:
            model.smooth.add_(1)
            model.count.add_(1)

    sync.step(local)
    if delay:
        assert (model.smooth.item(), model.count.item()) == (4.0 * comm.rank, 10 + 10 * comm.rank)
        sync.step(local)
    return model.smooth.item(), model.count.item()


@pytest.mark.parametrize(
    ("rule", "delay", "expected"),
    [
        ("average", 0, [(2.0, 10), (2.0, 10)]),
        ("keep", 0, [(0.0, 10), (4.0, 20)]),
        ("follow", 0, [(0.0, 10), (0.0, 10)]),
        # Late, they move by mean − sent: 1 + 2 = 3 is held at the mean, 2; 5 − 2 = 3. Counts: 11, 21 − 10.
        ("average", 1, [(2.0, 11), (3.0, 11)]),
        ("keep", 1, [(1.0, 11), (5.0, 21)]),
        # Rank 0's 0 was sent: 1 + 0, and 5 − 4 = 1.
        ("follow", 1, [(1.0, 11), (1.0, 11)]),
    ],
)
def test_buffers(rule: str, delay: int, expected: list[tuple[float, int]]) -> None:
    assert simulate(lambda comm: buffers(comm, rule, delay), 2) == expected


def test_buffers_that_are_true_or_false_follow() -> None:
    def worker(comm: Communicator) -> list[bool]:
        model = Transport()
        model.register_buffer("mask", torch.tensor([True, False]))
        sync = offbeat.local_sgd(model, sgd(model), every=1, delay=1, group=comm)
        for step in range(2):
            if step == 0:
                sync.step(lambda: model.mask.fill_(comm.rank == 0))
            else:
                sync.step(lambda: None)
        return model.mask.tolist()

    assert simulate(worker, 2) == [[True, True]] * 2


def momentum(comm: Communicator, rule: str, delay: int = 0) -> list[float]:
    """With momentum ½ the buffer is d, then 1.5 d, then 1.75 d; d = −1 and −3."""
    model = Transport()
    optimizer = sgd(model, momentum=0.5)
    sync = offbeat.local_sgd(model, optimizer, every=2, delay=delay, moments=rule, group=comm)
    go(model, sync, comm, 2 + delay)
    return optimizer.state[model.x]["momentum_buffer"].tolist()


@pytest.mark.parametrize(
    ("rule", "delay", "expected"),
    [
        ("keep", 0, [-1.5, -4.5]),
        ("average", 0, [-3.0, -3.0]),
        ("reset", 0, [0.0, 0.0]),
        ("keep", 1, [-1.75, -5.25]),
        # Sent −1.5 and −4.5, mean −3, moves of ∓1.5: −1.75 − 1.5 is held at −3; −5.25 + 1.5 = −3.75.
        ("average", 1, [-3.0, -3.75]),
        ("reset", 1, [0.0, 0.0]),
    ],
)
def test_momentum(rule: str, delay: int, expected: list[float]) -> None:
    found = simulate(lambda comm: momentum(comm, rule, delay), 2)
    assert found == [[value] * 2 for value in expected]


@pytest.mark.parametrize("rule", ["keep", "average", "reset"])
def test_moments_of_adamw(rule: str) -> None:
    def worker(comm: Communicator) -> dict[str, Any]:
        model = Transport()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75), amsgrad=True)
        sync = offbeat.local_sgd(model, optimizer, every=2, moments=rule, group=comm)
        go(model, sync, comm, 2)
        state = optimizer.state[model.x]
        now = {key: value.tolist() for key, value in state.items()}
        go(model, sync, comm, 1)
        return {**now, "then": state["step"].item()}

    # The first moment is ½d, then ¾d; the second ¼d², then 7/16 d²; d = −1 and −3.
    first, second = [-0.75, -2.25], [7 / 16, 63 / 16]
    if rule == "average":
        first, second = [-1.5, -1.5], [35 / 16, 35 / 16]
    if rule == "reset":
        first, second = [0.0, 0.0], [0.0, 0.0]
    steps = 0.0 if rule == "reset" else 2.0
    for rank, found in enumerate(simulate(worker, 2)):
        assert found == {
            "step": steps,
            "exp_avg": [first[rank]] * 2,
            "exp_avg_sq": [second[rank]] * 2,
            "max_exp_avg_sq": [second[rank]] * 2,
            "then": steps + 1,
        }


def test_moments_that_not_all_have(caplog: pytest.LogCaptureFixture) -> None:
    """The first step was skipped on rank 1: this round leaves them; the next averages."""

    def worker(comm: Communicator) -> list[float]:
        model = Transport()
        optimizer = sgd(model, momentum=0.5)
        sync = offbeat.local_sgd(model, optimizer, every=1, moments="average", group=comm)
        push(model, comm.rank)
        sync.step((lambda: None) if comm.rank == 1 else None)
        first = optimizer.state[model.x]["momentum_buffer"][0].item() if comm.rank == 0 else 0.0
        go(model, sync, comm, 1)
        return [first, optimizer.state[model.x]["momentum_buffer"][0].item()]

    with caplog.at_level(logging.WARNING, logger="offbeat"):
        # Rank 0: −1, then −1.5; rank 1: −3 at last. The mean −2.25.
        assert simulate(worker, 2) == [[-1.0, -2.25], [0.0, -2.25]]
    sentence = (
        "Not all workers have the optimizer moments of 1 of 1 tensors: these are not averaged in this round."
    )
    assert [record.message for record in caplog.records] == [sentence] * 2


# Gradients.


@pytest.mark.parametrize(("present", "expected"), [((0, 1), 2.0), ((0,), 0.5), ((1,), 1.5), ((), None)])
def test_gradients_that_are_none(present: tuple[int, ...], expected: float | None) -> None:
    """Of −1 and −3; one that is None counts as zero, and where all are, the optimizer skips as it would
    alone: no weight decay, no state."""

    def worker(comm: Communicator) -> tuple[Any, ...]:
        model = Transport(4.0)
        optimizer = sgd(model, momentum=0.5, weight_decay=1.0)
        sync = offbeat.ddp(model, optimizer, group=comm)
        model.x.grad = torch.full((2,), -(2.0 * comm.rank + 1)) if comm.rank in present else None
        sync.step()
        grad = None if model.x.grad is None else model.x.grad.tolist()
        return grad, model.x.tolist(), len(optimizer.state)

    if expected is None:
        wanted = (None, [4.0, 4.0], 0)
    else:
        wanted = ([-expected] * 2, [4.0 - (4.0 - expected)] * 2, 1)
    assert simulate(worker, 2) == [wanted] * 2


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    sync = offbeat.ddp(model, sgd(model))
    model(torch.tensor([1])).sum().backward()
    with says(TypeError, "The gradient of 'weight' is sparse: build its layer with sparse=False."):
        sync.step()


def test_sparse_gradients_do_not_matter_where_parameters_are_averaged() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(model.weight)
    sync = offbeat.local_sgd(model, sgd(model), every=1)
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    sync.step()
    assert (before - model.weight.detach()).tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


# What it says of itself.


def test_reprs() -> None:
    model = Transport()
    assert repr(offbeat.ddp(model, sgd(model))) == "ddp()"
    assert repr(offbeat.local_sgd(model, sgd(model), every=8)) == "local_sgd()"  # as the default
    assert repr(offbeat.local_sgd(model, sgd(model), every=Every(8))) == "local_sgd()"
    assert repr(offbeat.slowmo(model, sgd(model), every=Every(3), lr=1, momentum=0)) == (
        "slowmo(every=3, momentum=0.0)"
    )
    assert repr(offbeat.local_sgd(model, optimizer=sgd(model), every=3, delay="round", group=Solo())) == (
        "local_sgd(every=3, delay='round')"
    )
    assert repr(offbeat.local_sgd(model, sgd(model), every=Every(3, offset=1))) == (
        "local_sgd(every=Every(steps=3, offset=1))"
    )
    parts = [
        Exchange(params(model), when=Every(4), update=Correct(), delay=2, moments="reset", buffers="keep"),
        Exchange(offbeat.grads(model), when=offbeat.Never(), among=offbeat.Subgroups(1)),
    ]
    assert repr(Synchronizer(sgd(model), parts)) == (
        "Synchronizer([Exchange(params(1 tensors), when=Every(steps=4), among=World(), reduce=Mean(), "
        "update=Correct(gain=1.0), delay=2, buffers='keep', moments='reset', drift=True), "
        "Exchange(grads(1 tensors), when=Never(), among=Subgroups(1), reduce=Mean(), "
        "update=Replace(keep=0.0), delay=0, buffers='average', moments='keep', drift=False)])"
    )


@pytest.mark.slow
def test_every_method_is_told_as_it_was_written() -> None:
    def worker(comm: Communicator) -> None:
        for expression in METHODS:
            model = Dyadic()
            said = repr(offbeat.method(expression)(model, optimizer_for(model), group=comm))
            again = offbeat.method(said)
            assert again.name == offbeat.method(expression).name
            assert repr(again(model, optimizer_for(model), group=comm)) == said

    simulate(worker, 4)


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="offbeat"):
        model, sync = line(Solo(), "local_sgd(every=2)")
        go(model, sync, Solo(), 2)
        sync.finish()
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("offbeat", "INFO", "local_sgd(every=2) on 1 workers starts at step 0"),
        ("offbeat", "DEBUG", str(sync.reports[0])),
        ("offbeat", "INFO", f"local_sgd(every=2) finished after 2 steps: {sync.totals}"),
    ]


def test_rounds_have_names_in_a_profile() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.ddp(model, optimizer) as sync, torch.profiler.profile(record_shapes=False) as profile:
        model(torch.ones(1, 2)).sum().backward()
        sync.step()
    assert {"offbeat.begin", "offbeat.land"} <= {event.key for event in profile.key_averages()}
