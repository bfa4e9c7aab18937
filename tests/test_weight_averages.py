"""What users put around an optimizer works with the methods: averages of weights, and projected steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems import Realistic, data, optimizer_for
from table import ROWS, enough
from ticking import clocked
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize
from torch.optim.swa_utils import SWALR, AveragedModel

import offbeat


@pytest.mark.few(8)
@pytest.mark.parametrize("expression", ROWS)
def test_swa_reads_the_consensus_of_every_method(expression: str) -> None:
    """It averages what `averaged()` shows, so it is the same on all workers."""

    def worker(comm: offbeat.Communicator) -> tuple[Tensor, Tensor, float]:
        torch.manual_seed(comm.rank)
        net = Realistic(comm.rank)
        opt = optimizer_for(net, "momentum")
        sync = offbeat.method(expression)(net, opt, group=clocked(comm, expression))
        swa, rate, shown = AveragedModel(net), SWALR(opt, swa_lr=0.125, anneal_epochs=2), []
        for step in range(6):
            loss = net(data(comm.rank, step))
            loss.backward()
            sync.observe(loss.square())
            sync.step()
            opt.zero_grad()
            if step >= 3:
                with sync.averaged():
                    swa.update_parameters(net)
                    shown.append(flat(net))
                rate.step()
        sync.finish()
        return flat(swa), torch.stack(shown).mean(0), opt.param_groups[0]["lr"]

    results = offbeat.simulate(worker, enough(expression))
    for average, expected, lr in results:
        torch.testing.assert_close(average, expected)
        assert torch.equal(average, results[0][0])
        assert lr == 0.125


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class AdamP(torch.optim.Optimizer):
    """Adam whose steps lose their part along a weight that only has a direction (arXiv 2006.08217)."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8, "delta": 0.1})
        self.projected: list[bool] = []  # whether each step was

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self._project(p, self._adam(p, group), group), alpha=group["lr"])

    def _adam(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state, (first, second) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - first)
        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - second)
        size = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + group["eps"]
        return state["exp_avg"] / (1 - first ** state["step"]) / size

    def _project(self, p: Tensor, u: Tensor, group: dict[str, Any]) -> Tensor:
        limit = group["delta"] / math.sqrt(p[0].numel())
        across = p.ndim > 1 and bool(cosine_similarity(p.grad, p, dim=1).abs().max() < limit)
        self.projected.append(across)
        unit = normalize(p, dim=1)
        return u - unit * (unit * u).sum(1, keepdim=True) if across else u


class Directions(nn.Module):
    """A layer whose loss does not depend on the lengths of its rows, as before a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return (normalize(self.weight, dim=1) @ x - x[:5].roll(1)).square().sum()


def lengths(kind: Any, expression: str, workers: int, steps: int = 32) -> list[tuple[Any, ...]]:
    """Of each worker: squared lengths of the rows before and after each round, drifts, and projections."""

    def worker(comm: offbeat.Communicator) -> tuple[Any, ...]:
        net = Directions()
        opt = kind(net.parameters(), lr=0.1)
        sync = offbeat.method(expression)(net, opt, group=comm)
        before, after = [], []
        for step in range(steps):
            net(data(comm.rank, step)).backward()
            sync.step(lambda: (opt.step(), before.append(float(net.weight.detach().square().sum()))))
            opt.zero_grad()
            after.append(float(net.weight.detach().square().sum()))
        drifts = {report.step: report.drift for report in sync.reports}
        sync.finish()
        return before, after, drifts, getattr(opt, "projected", None)

    return offbeat.simulate(worker, workers)


def test_averaging_takes_the_drift_off_the_lengths_of_layers_that_only_have_a_direction() -> None:
    """|mean w|² = mean |w|² − drift. A step across w adds to |w|², so averaging undoes part of the growth."""
    results = lengths(AdamP, "local_sgd(every=8)", 4)
    for step in (8, 16, 24, 32):
        mean = sum(before[step - 1] for before, *_ in results) / 4
        for _, after, drifts, _ in results:
            assert after[step - 1] == pytest.approx(mean - drifts[step], rel=1e-4)
            assert drifts[step] > 0
    assert all(projected == [True] * 32 for *_, projected in results)  # also in the steps after a round


@pytest.mark.slow
def test_with_adamp_averaging_shortens_layers_that_only_have_a_direction() -> None:
    """Alone, both optimizers lengthen them. AdamP by so little that rounds take more off than steps add."""
    start = float(Directions().weight.detach().square().sum())
    ends: dict[tuple[str, int], float] = {}
    for kind in (torch.optim.Adam, AdamP):
        for every in (8, 1000):
            results = lengths(kind, f"local_sgd(every={every})", 4)
            ends[kind.__name__, every] = sum(after[-1] for _, after, *_ in results) / 4
    assert start < ends["Adam", 8] < ends["Adam", 1000]
    assert ends["AdamP", 8] < start < ends["AdamP", 1000] < ends["Adam", 8]
