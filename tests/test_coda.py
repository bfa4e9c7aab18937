"""The AUC as a loss of descent and ascent, and its method in stages."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from conftest import Pool
from sentences import says
from torch import Tensor, nn

import offbeat
from offbeat import AUCLoss


class Scorer(nn.Module):
    """A linear score, with its loss."""

    def __init__(self, ratio: float = 0.25) -> None:
        super().__init__()
        self.w, self.auc = nn.Parameter(torch.tensor([0.5, -0.25, 0.125])), AUCLoss(ratio)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.auc(x @ self.w, y)


def batch(rank: int, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 3, generator=draw), (torch.rand(size, generator=draw) < 0.4).float()


def values(model: Scorer) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def trained(
    comm: offbeat.Communicator, expression: str, steps: int, ratio: float = 0.25, together: int = 1
) -> list[Tensor]:
    """Parameters after every step. With `together`, a batch holds those of so many workers."""
    model = Scorer(ratio)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    trace = []
    for step in range(steps):
        batches = [batch(comm.rank + i, step) for i in range(together)]
        model(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])).backward()
        sync.step()
        optimizer.zero_grad()
        trace.append(values(model))
    return trace


def test_by_hand() -> None:
    """A positive of score w and a negative of score 0, p = ½, so that, over the batch,

    F = ¼(w − a)² + ¼b² − ½(1 + α)w − ¼α², from w = 1 and a = b = α = 0, with rate ½ and a pull of ¼.
    """
    model = nn.Module()
    model.w, model.auc = nn.Parameter(torch.ones(1)), AUCLoss(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sync = offbeat.coda(model, optimizer, every=1, stages=2, gamma=1.5, decay=2)
    trace = []
    for _ in range(4):
        model.auc(model.w * torch.tensor([1.0, 0.0]), torch.tensor([1, 0])).backward()
        sync.step()
        optimizer.zero_grad()
        trace.append([p.item() for p in (model.w, model.auc.a, model.auc.b, model.auc.alpha)])
    # Slopes 0, −½, 0 and, for alpha, −½: a = ¼ less a quarter of it, alpha = −¼.
    assert trace[0] == [1.0, 0.1875, 0.0, -0.25]
    # Slopes 0.03125, −0.40625, 0 and −0.375 lead to w = 0.98828125 and a = 0.29296875 after the pull; the
    # stage ends, and its mean takes their place.
    assert trace[1] == [0.994140625, 0.240234375, 0.0, -0.4375]
    assert trace[2] == [0.994140625, 0.240234375, 0.0, -0.994140625]  # no step, and alpha is −w
    # Half the rate: slopes ½(w − a) − ½(1 + α) = 0.3740234375, −0.376953125, 0 and −½(w + α) = 0; a pull of
    # 1/7.
    after = [
        0.994140625 - 0.25 * 0.3740234375 * 6 / 7,
        0.240234375 + 0.25 * 0.376953125 * 6 / 7,
        0,
        -0.994140625,
    ]
    assert trace[3] == pytest.approx(after, rel=1e-6)


def plain(steps: int, lengths: list[int], gamma: float, lr: float, p: float = 0.25) -> list[Tensor]:
    """PPD-SG with one worker, written out: descent in w, a, b and ascent in alpha, each with its own sign."""
    v = torch.tensor([0.5, -0.25, 0.125, 0.0, 0.0])
    alpha, start, total, done, estimate, trace = torch.zeros(()), v.clone(), torch.zeros(5), 0, False, []
    for step in range(steps):
        x, y = batch(0, step)
        if estimate:
            h = x @ v[:3]
            if 0 < y.sum() < len(y):
                alpha = h[y == 0].mean() - h[y == 1].mean()
            estimate = False
        else:
            own, dual = v.clone().requires_grad_(), alpha.clone().requires_grad_()
            h, a, b = x @ own[:3], own[3], own[4]
            rank = p * h * (1 - y) - (1 - p) * h * y
            far = (1 - p) * (h - a) ** 2 * y + p * (h - b) ** 2 * (1 - y)
            f = (far + 2 * (1 + dual) * rank).mean() - p * (1 - p) * dual**2
            dv, da = torch.autograd.grad(f, [own, dual])
            v, alpha = (gamma * (v - lr * dv) + lr * start) / (gamma + lr), alpha + lr * da
            total, done = total + v, done + 1
            if lengths and done == lengths[0]:
                v, lr, lengths, done, estimate = total / done, lr / 3, lengths[1:], 0, True
                start, total = v.clone(), torch.zeros(5)
        trace.append(torch.cat([v, alpha.view(1)]))
    return trace


def test_one_worker_is_the_plain_algorithm() -> None:
    trace = trained(offbeat.Solo(), "coda(every=1, stages=(3, 5, 9), gamma=2.0)", 14)
    for step, (mine, other) in enumerate(zip(trace, plain(14, [3, 5], 2.0, 0.25), strict=True)):
        torch.testing.assert_close(mine, other, msg=f"step {step + 1}")


def test_averaging_every_step_is_one_worker_with_all_batches() -> None:
    expression = "coda(every=1, stages=(3, 5, 9), gamma=2.0)"
    (alone,) = offbeat.simulate(lambda comm: trained(comm, expression, 12, together=3), 1)
    for trace in offbeat.simulate(lambda comm: trained(comm, expression, 12), 3):
        for mine, other in zip(trace, alone, strict=True):
            torch.testing.assert_close(mine, other)


ROW = "coda(every=2, stages=(3, 3, 9), gamma=2.0)"


def test_real_workers_do_what_simulated_ones_do(pool: Pool) -> None:
    real = pool.run(trained, ROW, 10, workers=2)
    for a, b in zip(real, offbeat.simulate(lambda comm: trained(comm, ROW, 10), 2), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_resume_after_any_step() -> None:
    def worker(comm: offbeat.Communicator, cut: int) -> Tensor:
        parts: list[Any] = []
        for first, last in ((0, cut), (cut, 10)):
            saved = [part.state_dict() for part in parts]
            file = io.BytesIO()
            torch.save(saved, file)
            model = Scorer()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
            parts = [model, optimizer, offbeat.method(ROW)(model, optimizer, group=comm)]
            for part, state in zip(
                parts, torch.load(io.BytesIO(file.getvalue()), weights_only=True), strict=False
            ):
                part.load_state_dict(state)
            for step in range(first, last):
                model(*batch(comm.rank, step)).backward()
                parts[2].step()
                optimizer.zero_grad()
        return values(model)

    whole = offbeat.simulate(lambda comm: worker(comm, 0), 2)
    for cut in (2, 3, 4, 7):
        resumed = offbeat.simulate(lambda comm, cut=cut: worker(comm, cut), 2)
        assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True)), f"cut after step {cut}"


def test_where_the_best_a_b_and_alpha_are() -> None:
    """a = E[h | +], b = E[h | −] and α = b − a, if the batch has the ratio."""
    h, y = torch.tensor([1.5, 0.5, -1.0, 0.25]), torch.tensor([1, 0, 0, 0])
    loss = AUCLoss(0.25)
    with torch.no_grad():
        loss.a.fill_(1.5)
        loss.b.fill_(-0.25 / 3)
        loss.alpha.fill_(-0.25 / 3 - 1.5)
    loss(h, y).backward()
    assert [p.grad.item() for p in loss.parameters()] == pytest.approx([0, 0, 0], abs=1e-7)


def test_a_batch_without_positives_is_no_error() -> None:
    def worker(comm: offbeat.Communicator) -> list[float]:
        model = Scorer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        sync = offbeat.coda(model, optimizer, every=2, stages=2, group=comm)
        alphas = []
        for step in range(4):
            model(batch(comm.rank, step)[0], torch.zeros(4)).backward()
            sync.step()
            optimizer.zero_grad()
            alphas.append(model.auc.alpha.item())
        assert values(model).isfinite().all()
        return alphas

    for alphas in offbeat.simulate(worker, 2):
        assert alphas[1] == alphas[2] != alphas[3]  # nothing to estimate from, so alpha stays


def test_workers_agree_on_the_share_of_positives() -> None:
    def worker(comm: offbeat.Communicator) -> float:
        model = Scorer((0.125, 0.25, 0.75)[comm.rank])
        offbeat.coda(model, torch.optim.SGD(model.parameters(), lr=0.1), group=comm)
        return model.auc.ratio

    assert offbeat.simulate(worker, 3) == [0.375] * 3


@pytest.mark.parametrize("expression", ["ddp()", "local_sgd(every=2)", "diloco(every=2)"])
def test_other_methods_average_the_loss_too(expression: str) -> None:
    """And alpha ascends: its slope is negative while positives score higher than others."""

    def worker(comm: offbeat.Communicator) -> Tensor:
        model = Scorer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        with offbeat.method(expression)(model, optimizer, group=comm) as sync:
            for _ in range(4):
                model(torch.eye(3), torch.tensor([1, 0, 0])).backward()
                sync.step()
                optimizer.zero_grad()
        return values(model)

    first, second = offbeat.simulate(worker, 2)
    assert torch.equal(first, second)
    assert first[-1] < 0


def test_what_it_sends_is_counted() -> None:
    """The share of positives at the start, a model at the end of the stage, and four numbers after it."""

    def worker(comm: offbeat.Communicator) -> list[int]:
        model = Scorer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        sync = offbeat.coda(model, optimizer, every=100, stages=2, group=comm)
        sent = [sync.totals.bytes_sent]
        for step in range(3):
            model(*batch(comm.rank, step)).backward()
            sync.step()
            optimizer.zero_grad()
            sent.append(sync.totals.bytes_sent)
        return sent

    for sent in offbeat.simulate(worker, 2):
        assert sent[0] >= 8
        assert sent[2] - sent[1] == 5 * 4 + 64  # w, a, b and a header
        assert sent[3] - sent[2] == 4 * 8


NET = Scorer()
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AUCLoss(0), "AUCLoss(ratio=0): ratio is the share of positives: above 0, below 1."),
        (lambda: AUCLoss(1.0), "AUCLoss(ratio=1.0): ratio is the share of positives: above 0, below 1."),
        (
            lambda: AUCLoss(0.1)(torch.zeros(3, 2), torch.zeros(3)),
            "AUCLoss: [3, 2] scores for [3] labels: give one score each.",
        ),
        (
            lambda: offbeat.coda(NET, SGD, stages=0),
            "Stages(0, gamma=500.0, decay=3.0): stages must be whole numbers of steps, at least 1.",
        ),
        (
            lambda: offbeat.coda(NET, SGD, stages=(2, 0.5)),
            "Stages((2, 0.5), gamma=500.0, decay=3.0): stages must be whole numbers of steps, at least 1.",
        ),
        (
            lambda: offbeat.coda(NET, SGD, gamma=0.0),
            "Stages(4000, gamma=0.0, decay=3.0): gamma must be a positive number.",
        ),
        (
            lambda: offbeat.coda(NET, SGD, decay=0.5),
            "Stages(4000, gamma=500.0, decay=0.5): decay must be at least 1.",
        ),
        (
            lambda: offbeat.coda(nn.ModuleList([AUCLoss(0.1), AUCLoss(0.1)]), SGD),
            "Stages(model, ...): the model has 2 AUCLoss modules: keep one.",
        ),
    ],
)
def test_sentences(make: Any, sentence: str) -> None:
    with says(ValueError, sentence):
        make()


def test_the_mean_of_a_long_stage_is_exact() -> None:
    """A sum of 300 equal weights in their own precision would be off."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(7, 3, bias=False, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        before = model.weight.detach().clone()
        sync = offbeat.coda(model, optimizer, every=1000, stages=(300, 9), group=offbeat.Solo())
        for _ in range(300):
            model.weight.grad = torch.ones_like(model.weight)
            sync.step()
        assert sync.parts[0].stage == 1
        assert torch.equal(model.weight, before)
