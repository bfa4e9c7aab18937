"""What users put into a training loop: scalers, clipping, schedulers, several optimizers, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, Realistic, data, optimizer_for, same, snapshot
from torch import Tensor, nn

import offbeat

ALL = [
    "ddp()",
    "local_sgd(every=3)",
    "local_sgd(every=3, delay=2)",
    "hierarchical(nodes=2, inner=1, outer=4)",
]


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in snapshot(model).items() if v.is_floating_point()}


def equal(ends: list[dict[str, Tensor]]) -> bool:
    return all(same(end, ends[0]) for end in ends)


def skipping(comm: offbeat.Communicator, expression: str) -> tuple[int, int, list[int], dict[str, Tensor]]:
    """Rank 1 sees an inf in its third gradient: its scaler skips the optimizer's step, others do not."""
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    sync = offbeat.method(expression)(net, opt, group=comm)
    skipped = 0

    def local() -> None:
        nonlocal skipped
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before

    for step in range(10):
        x = torch.full((2, 3), float(comm.rank + step))
        scaler.scale(net(x).square().mean()).backward()
        if comm.rank == 1 and step == 2:
            net.weight.grad[0, 0] = float("inf")
        sync.step(local)
        opt.zero_grad()
    rounds = sorted(report.step for report in sync.reports)
    sync.finish()
    return sync.steps, skipped, rounds, floats(net)


@pytest.mark.parametrize("expression", ALL)
def test_a_scaler_that_skips_on_one_rank(pool: Pool, expression: str) -> None:
    answers = pool.run(skipping, expression)
    assert [steps for steps, *_ in answers] == [10] * 4
    # An average of gradients brings the inf to everybody.
    assert [skipped for _, skipped, *_ in answers] == ([1] * 4 if expression == "ddp()" else [0, 1, 0, 0])
    assert all(rounds == answers[0][2] for _, _, rounds, _ in answers)
    ends = [end for *_, end in answers]
    assert equal(ends)
    assert all(value.isfinite().all() for value in ends[0].values())


def test_local_is_always_called_and_its_result_returned() -> None:
    net = Dyadic()
    sync = offbeat.local_sgd(net, optimizer_for(net), every=2)
    calls = []
    for step in range(4):
        net(data(0, step)).backward()
        assert sync.step(lambda step=step: calls.append(step) or step) == step
    assert calls == [0, 1, 2, 3]
    assert sync.steps == 4


def accumulating(comm: offbeat.Communicator, expression: str, pieces: int) -> dict[str, Tensor]:
    """The same gradient, in one piece or in several."""
    net = Dyadic()
    opt = optimizer_for(net, "momentum")
    with offbeat.method(expression)(net, opt, group=comm) as sync:
        for step in range(7):
            for _ in range(pieces):
                (net(data(comm.rank, step)) / pieces).backward()
            sync.step()
            opt.zero_grad()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("expression", ALL)
def test_gradient_accumulation(pool: Pool, expression: str) -> None:
    whole, pieces = (pool.run(accumulating, expression, n) for n in (1, 4))
    assert all(same(a, b) for a, b in zip(whole, pieces, strict=True))


def clipping(comm: offbeat.Communicator, clip_inside: bool) -> tuple[list[float], dict[str, Tensor]]:
    """`ddp` averages before `local`, so clipping there acts on the mean, as with torch's DDP."""
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.ddp(net, opt, group=comm)
    lengths = []

    def local() -> None:
        lengths.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        opt.step()

    net.weight.grad = torch.tensor([[3.0 * comm.rank, 4.0 * comm.rank]])
    sync.step(local if clip_inside else None)
    sync.finish()
    return lengths, snapshot(net)


def test_clipping_in_local_sees_what_the_optimizer_sees(pool: Pool) -> None:
    for lengths, end in pool.run(clipping, True):
        assert lengths == [7.5]
        torch.testing.assert_close(end["weight"], torch.tensor([[-0.6, -0.8]]))
    for _, end in pool.run(clipping, False):
        assert torch.equal(end["weight"], torch.tensor([[-4.5, -6.0]]))


def several(comm: offbeat.Communicator, expression: str, split: bool) -> dict[str, Tensor]:
    net = Realistic()
    torch.manual_seed(comm.rank)
    first, last = net.body[0].parameters(), [*net.body[1].parameters(), *net.body[4].parameters()]
    if split:
        opts = [torch.optim.AdamW(first, lr=0.01), torch.optim.AdamW(last, lr=0.02)]
    else:
        opts = [torch.optim.AdamW([{"params": first, "lr": 0.01}, {"params": last, "lr": 0.02}])]
    with offbeat.method(expression)(net, opts, group=comm) as sync:
        for step in range(7):
            net(data(comm.rank, step)).backward()
            sync.step()
            for opt in opts:
                opt.zero_grad()
    return floats(net)


@pytest.mark.parametrize("expression", [*ALL, "local_sgd(every=3, moments='average')"])
def test_a_list_of_optimizers(pool: Pool, expression: str) -> None:
    one, two = (pool.run(several, expression, split) for split in (False, True))
    assert equal(one + two)


def plateau(opt: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=12),
    "plateau": plateau,
}


def scheduled(comm: offbeat.Communicator, name: str, expression: str, alone: bool = False) -> Any:
    net = nn.Linear(7, 1)
    nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    scheduler = SCHEDULERS[name](opt)
    rates = []
    with offbeat.method(expression)(net, opt, group=comm) as sync:
        for step in range(12):
            loss = net(data(comm.rank, step)).square().sum()
            loss.backward()
            sync.step()
            opt.zero_grad()
            if name == "plateau":
                mine = loss.detach() if alone else comm.mean([loss.detach()]).wait()[0]
                scheduler.step(mine)
            else:
                scheduler.step()
            rates.append(opt.param_groups[0]["lr"])
    return rates, sorted((report.step, report.period) for report in sync.reports), floats(net)


@pytest.mark.few(7)
@pytest.mark.parametrize("expression", [*ALL, "qsr(alpha=0.03, base=2)"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(pool: Pool, name: str, expression: str) -> None:
    answers = pool.run(scheduled, name, expression)
    assert len(set(answers[0][0])) > 1
    assert all(rates == answers[0][0] for rates, *_ in answers)
    assert all(rounds == answers[0][1] for _, rounds, _ in answers)
    assert equal([end for *_, end in answers])


def test_a_plateau_seen_by_each_rank_for_itself(pool: Pool) -> None:
    answers = pool.attempt(scheduled, "plateau", "local_sgd(every=3)", True)
    assert {type(answer) for answer in answers} == {offbeat.Disagreement}
    assert all("Step the learning-rate scheduler on every worker." in str(answer) for answer in answers)


def compiled(
    comm: offbeat.Communicator, expression: str, backend: str | None
) -> tuple[int, dict[str, Tensor]]:
    """Rounds must not make the compiler compile again. A compiled model has the names of the model."""
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.25)
    model = net if backend is None else torch.compile(net, backend=backend)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    frames = 0
    # Inductor compiles and runs six programs to find out what the processor can do: it need not know.
    torch._inductor.config.cpp.vec_isa_ok = False
    with torch._dynamo.config.patch(error_on_recompile=True):
        with offbeat.method(expression)(model, opt, group=comm) as sync:
            for step in range(10):
                x = torch.stack([data(comm.rank, 4 * step + i) for i in range(4)])
                model(x).square().mean().backward()
                sync.step()
                opt.zero_grad(set_to_none=step % 2 == 0)
                if step == 6:
                    with sync.averaged():
                        pass
        frames = torch._dynamo.utils.counters["frames"]["ok"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return frames, floats(net)


def of_each_backend(comm: offbeat.Communicator, expression: str, backend: str) -> list[Any]:
    return [compiled(comm, expression, choice) for choice in (None, backend)]


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["ddp()", "local_sgd(every=3, delay=2, moments='average')"])
def test_torch_compile_compiles_once(pool: Pool, expression: str) -> None:
    for (_, plain), (frames, end) in pool.run(of_each_backend, expression, "aot_eager", workers=2):
        assert frames == 1
        for name in plain:
            torch.testing.assert_close(end[name], plain[name], rtol=1e-5, atol=1e-6)


def of_inductor(comm: offbeat.Communicator, expression: str) -> list[Any]:
    """It takes long to compile: one of the workers does."""
    return [compiled(comm, expression, choice) for choice in (None, None if comm.rank else "inductor")]


@pytest.mark.slow
def test_torch_compile_with_inductor(pool: Pool) -> None:
    runs = pool.run(of_inductor, "local_sgd(every=3)", workers=2)
    assert [frames for _, (frames, _) in runs] == [1, 0]
    for (_, plain), (_, end) in runs:
        for name in plain:
            torch.testing.assert_close(end[name], plain[name], rtol=1e-4, atol=1e-5)


def normalized(comm: offbeat.Communicator, expression: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    net = nn.BatchNorm1d(1, momentum=None)
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    with offbeat.method(expression)(net, opt, group=comm) as sync:
        for step in range(2):
            net(torch.tensor([[float(comm.rank)], [comm.rank + 2.0 + step]])).sum().backward()
            sync.step()
        before = snapshot(net)
    return before, snapshot(net)


@pytest.mark.parametrize(
    ("expression", "means"),
    [
        ("local_sgd(every=2)", [1.5, 1.5]),
        ("local_sgd(every=2, buffers='keep')", [1.25, 1.75]),
        ("ddp()", [1.25, 1.25]),  # rank 0's
    ],
)
def test_batch_norm(pool: Pool, expression: str, means: list[float]) -> None:
    """Everyone starts from rank 0's 1, after the first batch; the second has mean 1.5 and 2.5."""
    answers = pool.run(normalized, expression, workers=2)
    assert [before["running_mean"].item() for before, _ in answers] == means
    assert [before["num_batches_tracked"].item() for before, _ in answers] == [2, 2]
    ends = [after for _, after in answers]
    assert torch.equal(ends[0]["running_mean"], ends[1]["running_mean"])


def in_precision(comm: offbeat.Communicator, expression: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    trace = []
    with offbeat.method(expression)(net, opt, group=comm) as sync:
        for step in range(7):
            net(data(comm.rank, step).to(dtype)).square().sum().backward()
            sync.step()
            opt.zero_grad()
            trace.append(snapshot(net))
        reports = sync.reports
    assert reports
    assert all(report.drift is None or report.drift >= 0 for report in reports)
    assert all(p.dtype == dtype for p in net.parameters())
    return [*trace, snapshot(net)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("expression", [*ALL, "local_sgd(every=3, delay=1, moments='average')"])
def test_precisions(pool: Pool, expression: str, dtype: torch.dtype) -> None:
    assert equal([trace[-1] for trace in pool.run(in_precision, expression, dtype)])


def rounded(comm: offbeat.Communicator) -> float:
    net = nn.Linear(1, 1, bias=False).bfloat16()
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.local_sgd(net, opt, every=1, group=comm)

    def to_my_own() -> None:
        with torch.no_grad():
            net.weight.fill_(256.0 if comm.rank == 0 else 1.0)

    sync.step(to_my_own)
    return net.weight.item()


def test_halves_are_summed_in_full_precision(pool: Pool) -> None:
    """256 + 1 is 256 in bfloat16: summed so, the mean of 256, 1, 1 and 1 were 64; 64.75 is rounded to 65."""
    assert pool.run(rounded) == [65.0] * 4
