"""Workers whose data ends: they take part without counting until all have run dry."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, data, optimizer_for, problem, same, snapshot
from sentences import says
from table import BROAD
from ticking import clocked, needs_clock
from torch import Tensor

import offbeat
from offbeat.engine.weights import SHARE

Trace = list[dict[str, Tensor]]


def run_dry(comm: offbeat.Communicator, expression: str, counts: tuple[int, ...], **options: Any) -> Trace:
    """Weights after this worker's last step, after `join()`, and in the end. Rank r has counts[r] batches."""
    net = problem(expression)(seed=comm.rank)
    opt = optimizer_for(net, options.pop("optimizer", "sgd"))
    sync = offbeat.method(expression)(net, opt, group=clocked(comm, expression))
    trace = [snapshot(net)]
    for step in sync.batches(range(counts[comm.rank]), options.pop("each", None)):
        net(data(comm.rank, step)).backward()
        sync.step(**options)
        opt.zero_grad()
        trace[0] = snapshot(net)
    trace.append(snapshot(net))
    sync.finish()
    return [*trace, snapshot(net), {"steps": torch.tensor(sync.steps)}]


def wait_for_others(
    comm: offbeat.Communicator, expression: str, counts: tuple[int, ...], steps: int, optimizer: str = "sgd"
) -> Trace:
    """The same samples, on a machine that takes part with samples=0 once it has none."""
    net = Dyadic(seed=comm.rank)
    opt = optimizer_for(net, optimizer)
    sync = offbeat.method(expression)(net, opt, group=comm)
    for step in range(steps):
        averages_gradients = expression.startswith("ddp") or ("warmup=3" in expression and step < 3)
        if has := step < counts[comm.rank]:
            net(data(comm.rank, step)).backward()
        sync.step(None if has or averages_gradients else lambda: None, samples=float(has))
        opt.zero_grad()
    sync.finish()
    return [snapshot(net)]


# The method, the last step of those who wait in `join()`, and the last step that does something.
LAWS = [
    ("ddp()", 7, 6),
    ("ddp(delay=1)", 8, 7),
    ("local_sgd(every=4)", 8, 8),
    ("local_sgd(every=4, drift=False, moments='average')", 8, 8),
    ("local_sgd(every=4, delay=2, gain=1.0)", 10, 10),
    ("hierarchical(nodes=2, inner=2, outer=4)", 8, 8),
    ("diloco(every=4, lr=0.5, momentum=0.5, ramp=0)", 8, 8),
    ("diloco(every=2, lr=0.5, momentum=0.5, ramp=0, warmup=3)", 7, 7),
    ("slowmo(every=4, lr=0.5, momentum=0.5, ramp=0)", 8, 8),
    ("local_sgd(every=4, reduce=Quantized(8, block=8, least=1))", 8, 8),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("expression", "end", "steps"), LAWS)
@pytest.mark.parametrize("counts", [(6, 2, 6, 2), (2, 6, 0, 6)])
def test_the_result_is_that_of_a_machine_that_waited(
    expression: str, end: int, steps: int, counts: tuple[int, ...]
) -> None:
    dry = offbeat.simulate(lambda comm: run_dry(comm, expression, counts, optimizer="momentum"), 4)
    assert [int(trace[-1]["steps"]) for trace in dry] == [end] * 4
    waited = offbeat.simulate(lambda comm: wait_for_others(comm, expression, counts, steps, "momentum"), 4)
    near = 0.05 if "Quantized" in expression else 1e-6
    for a, (b,) in zip(dry, waited, strict=True):
        for name, tensor in b.items():
            torch.testing.assert_close(a[2][name], tensor, rtol=near, atol=near, msg=name)


@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("expression", ["ddp()", "ddp(reduce=Quantized(8, block=8, least=1))"])
def test_large_gradients_leave_in_buckets_without_the_dry(expression: str, samples: int | None) -> None:
    """Rank 1 has no data at all, and does not know whether the others give samples."""

    def worker(comm: offbeat.Communicator, workers: int) -> Tensor:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        sync = offbeat.method(expression)(net, opt, group=comm)
        for step in sync.batches(range(0 if comm.rank else 4)):
            x = torch.randn(5, 300, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            sync.step(samples=samples)
            opt.zero_grad()
        sync.finish()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    (alone,) = offbeat.simulate(lambda comm: worker(comm, 1), 1)
    near = 1e-3 if "Quantized" in expression else 1e-6
    for weights in offbeat.simulate(lambda comm: worker(comm, 2), 2):
        torch.testing.assert_close(weights, alone, rtol=near, atol=near)


class Line(torch.nn.Module):
    """One weight; rank r climbs by 4ʳ a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))


def climb(
    comm: offbeat.Communicator, expression: str, counts: tuple[int, ...], epochs: int = 1
) -> tuple[list[float], int]:
    """The weight after each epoch and in the end, and the number of steps."""
    net, trace = Line(), []
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.method(expression)(net, opt, group=comm)
    for _ in range(epochs):
        for _ in sync.batches(range(counts[comm.rank])):
            (-(4.0**comm.rank) * net.weight.sum()).backward()
            sync.step()
            opt.zero_grad()
        trace.append(net.weight.item())
    sync.finish()
    return [*trace, net.weight.item()], sync.steps


def test_closed_forms() -> None:
    def climbs(*arguments: Any) -> tuple[list[float], int]:
        one, two = offbeat.simulate(lambda comm: climb(comm, *arguments), 2)
        assert one == two
        return one

    # Rank 0 makes 2 steps of 1, rank 1 one step of 4 of these two: (2·2 + 1·4)/3.
    assert climbs("local_sgd(every=2)", (2, 1)) == ([8 / 3, 8 / 3], 4)
    # After step 2 the mean is (2 + 8)/2 = 5. Then rank 1 goes on alone, by 4 each; the end is step 6.
    assert climbs("local_sgd(every=2)", (2, 4)) == ([13.0, 13.0], 6)
    # Equal data that ends with a round: one more round says so, and changes nothing, also with momentum.
    assert climbs("local_sgd(every=2)", (2, 2)) == ([5.0, 5.0], 4)
    assert climbs("diloco(every=2, lr=1.0, momentum=0.5, ramp=0)", (2, 2)) == ([7.5, 7.5], 4)
    # Equal data that ends within a period: the rest of it is empty. Both have made half of their steps.
    assert climbs("local_sgd(every=2)", (1, 1)) == ([2.5, 2.5], 2)
    # Gradients: both, then rank 1 alone: 2.5 + 4.
    assert climbs("ddp()", (1, 2)) == ([6.5, 6.5], 3)
    # Another epoch goes on from there: 2.5 + 4, twice.
    assert climbs("ddp()", (1, 2), 2) == ([6.5, 13.0, 13.0], 6)
    # Nobody has data.
    assert climbs("local_sgd(every=2)", (0, 0)) == ([0.0, 0.0], 2)


def test_a_round_without_data_sends_headers_only() -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        net = Line()
        sync = offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=1.0), every=1, group=comm)
        sync.step()
        sync.join()
        return [report.bytes_sent for report in sync.reports]

    for full, void in offbeat.simulate(worker, 2):
        assert 64 <= void < full


# Methods that do not weigh workers, and those whose rounds cannot say who is done.
UNFIT = (
    "ssd_sgd",
    "od_sgd",
    "wagma",
    "eager_",
    "gradient_code",
    "def_sgd",
    "a2sgd",
    "coda",
    "noloco",
    "adacomm",
)


@pytest.mark.few(4)
@pytest.mark.parametrize("expression", [row for row in BROAD if not row.startswith(UNFIT)])
def test_simulation_equals_gloo(pool: Pool, expression: str) -> None:
    """Every method: two workers run dry. In the end all are equal, after the same number of steps."""
    counts = (7, 3, 7, 3)
    real = pool.run(run_dry, expression, counts)
    virtual = offbeat.simulate(lambda comm: run_dry(comm, expression, counts), 4)
    for a, b in zip(real, virtual, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(a[2][name], x) for name, x in real[0][2].items() if x.is_floating_point())
        if not needs_clock(expression):
            assert a[3] == real[0][3]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 6])
def test_resume_while_some_are_dry(cut: int) -> None:
    """Rank 0 runs dry after 2 steps, and saves within `join()`."""

    def run(comm: offbeat.Communicator, cut: int | None) -> dict[str, Tensor]:
        net = Dyadic()
        opt = optimizer_for(net, "momentum")
        sync = offbeat.local_sgd(net, opt, every=4, delay=1, group=comm)
        saved: list[io.BytesIO] = []

        def each() -> None:
            if sync.steps == cut and not saved:
                saved.append(io.BytesIO())
                torch.save([net.state_dict(), opt.state_dict(), sync.state_dict()], saved[0])

        def go(first: int) -> None:
            for step in sync.batches(range(first, (2, 7)[comm.rank]), each):
                net(data(comm.rank, step)).backward()
                sync.step()
                opt.zero_grad()
                each()

        go(0)
        if cut is not None:
            saved[0].seek(0)
            weights, optimizer, state = torch.load(saved[0], weights_only=True)
            net = Dyadic(seed=9)
            net.load_state_dict(weights)
            opt = optimizer_for(net, "momentum")
            opt.load_state_dict(optimizer)
            sync = offbeat.local_sgd(net, opt, every=4, delay=1, group=comm)
            sync.load_state_dict(state)
            go(cut)
        sync.finish()
        return snapshot(net)

    whole = offbeat.simulate(lambda comm: run(comm, None), 2)
    resumed = offbeat.simulate(lambda comm: run(comm, cut), 2)
    assert all(same(a, b) for a, b in zip(whole, resumed, strict=True))


def test_the_rest_of_the_loop_goes_on() -> None:
    """A learning-rate scheduler and an evaluation, on a worker that has run dry."""

    def worker(comm: offbeat.Communicator, scheduled: bool) -> list[float]:
        net, seen = Line(), []
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
        sync = offbeat.ddp(net, opt, group=comm)

        def rest() -> None:
            if scheduled:
                scheduler.step()
            with sync.averaged():
                seen.append(net.weight.item())

        for _ in sync.batches(range((1, 2)[comm.rank]), rest):
            (-net.weight.sum()).backward()
            sync.step()
            opt.zero_grad()
            rest()
        return seen

    assert offbeat.simulate(lambda comm: worker(comm, True), 2) == [[1.0, 1.5, 1.5]] * 2


REFUSED = [
    ("wagma(every=3)", "GroupAverage("),
    ("eager_diloco(every=3)", "Exchange("),
    ("ssd_sgd(every=2)", "PushPull("),
]


@pytest.mark.parametrize(("expression", "part"), REFUSED)
def test_methods_that_need_every_worker_refuse(expression: str, part: str) -> None:
    net = Line()
    sync = offbeat.method(expression)(net, torch.optim.SGD(net.parameters(), lr=1.0), group=offbeat.Solo())
    with pytest.raises(
        ValueError, match=r"^batches\(\): .* does not weigh workers: give every worker the "
    ) as e:
        next(iter(sync.batches([1])))
    assert part in str(e.value)


def test_rounds_that_cannot_say_who_is_done_refuse() -> None:
    def sentence(expression: str) -> Callable[[offbeat.Communicator], None]:
        def worker(comm: offbeat.Communicator) -> None:
            net = Line()
            sync = offbeat.method(expression)(net, torch.optim.SGD(net.parameters(), lr=1.0), group=comm)
            sync.join()

        return worker

    with says(
        ValueError,
        "join(): no round of this method has all workers, so none can show that all are done: give "
        "every worker the same number of batches.",
    ):
        offbeat.simulate(sentence("noloco(every=2)"), 4)
    with says(
        ValueError,
        "join(): AdaComm(start=2, interval=3, warmup=0) needs a loss from every worker: give every worker "
        "the same number of batches.",
    ):
        offbeat.simulate(sentence("adacomm(start=2, interval=3)"), 2)


def test_a_gradient_that_has_left_needs_its_step() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        net = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
        sync = offbeat.ddp(net, torch.optim.SGD(net.parameters(), lr=0.1), group=comm)
        for _ in range(2):
            net(torch.ones(1, 300)).sum().backward()
            if comm.rank or sync.steps == 0:
                sync.step()
            else:
                sync.join()

    with says(RuntimeError, "join(): no step has used the last backward pass: call step() first."):
        offbeat.simulate(worker, 2)


MOVES = [[8.0, 4.0, 2.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.5]]


def send_one_of_three(comm: offbeat.Communicator) -> list[list[float]]:
    """The weights of worker 0 after each of its steps. Worker 1 has data for one. Rounds send one weight."""
    net = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    opt, trace = torch.optim.SGD(net.parameters(), lr=1.0), []
    feedback = offbeat.ErrorFeedback(offbeat.TopK(3, least=1))
    sync = offbeat.diloco(net, opt, every=1, lr=1.0, momentum=0.0, reduce=feedback, group=comm)
    for move in sync.batches(MOVES[: 1 if comm.rank else 3]):
        net.weight.grad = -torch.tensor([move])
        sync.step()
        trace.append(net.weight[0].tolist())
    sync.finish()
    return trace


def test_what_is_left_to_send_keeps_its_weight_when_a_worker_runs_dry() -> None:
    """Both send 8, and keep 4 and 2. Then worker 1 is dry, so that means are multiplied by 2.

    The second round sends 1 + 4 and 4, each at the new weight: (5 + 4)/2·2 = 9. The 2 that is left of either
    weighs as much as before: with the 0.5 of worker 0 alone that is (0.5 + 1 + 1)/2·2.
    """
    trace = offbeat.simulate(send_one_of_three, 2)[0]
    assert trace == [[8.0, 0.0, 0.0], [8.0, 9.0, 0.0], [8.0, 9.0, 2.5]]


def test_batches_of_no_loader_are_refused() -> None:
    net = torch.nn.Linear(1, 1)
    sync = offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2)
    with pytest.raises(TypeError, match=r"batches\(5\): pass a DataLoader"):
        next(sync.batches(5))


def test_pulls_of_a_worker_without_data_are_no_steps() -> None:
    """Those of a worker with data are part of its period; those of a dry one count for nothing."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        net = torch.nn.Linear(1, 1)
        sync = offbeat.palsgd(net, torch.optim.SGD(net.parameters(), lr=0.1), every=8, p=0.4, group=comm)
        words: list[float] = []
        tally = sync.parts[0].tally
        own = tally.word

        def word(step: int, dropped: int = 0) -> tuple[float, int]:
            words.append(own(step, dropped)[0])
            return own(step, dropped)

        tally.word = word
        for _ in sync.batches(range(0 if comm.rank else 24)):
            net(torch.ones(1, 1)).sum().backward()
            sync.step()
            net.zero_grad()
        return words

    _, dry = offbeat.simulate(worker, 2)
    assert set(dry) == {SHARE}
