"""Muon for the matrices and AdamW for the rest, inside an outer step: the setting of MuLoCo."""

from __future__ import annotations

import io

import pytest
import torch
from problems import data
from torch import Tensor, nn

import offbeat

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)

MULOCO = "diloco(every=3, lr=0.7, momentum=0.5)"


class Worker:
    def __init__(self, comm: offbeat.Communicator, expression: str) -> None:
        torch.manual_seed(0)
        self.rank, self.net = comm.rank, nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))
        muon = torch.optim.Muon([p for p in self.net.parameters() if p.ndim == 2], lr=0.1)
        adamw = torch.optim.AdamW([p for p in self.net.parameters() if p.ndim < 2], lr=0.1)
        self.optimizers = [muon, adamw]
        self.sync = offbeat.method(expression)(self.net, self.optimizers, group=comm)

    def go(self, first: int, last: int) -> Tensor:
        for step in range(first, last):
            x = data(self.rank, step)
            (self.net(x) - x.roll(1)).square().mean().backward()
            self.sync.step()
            self.net.zero_grad()
        return torch.cat([p.detach().flatten().clone() for p in self.net.parameters()])

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.net, *self.optimizers, self.sync)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.net, *self.optimizers, self.sync), states, strict=True):
            part.load_state_dict(state)


def run(expression: str, workers: int = 3) -> list[Tensor]:
    return offbeat.simulate(lambda comm: Worker(comm, expression).go(0, 9), workers)


def test_an_outer_step_of_length_one_is_averaging() -> None:
    for mine, other in zip(
        run("diloco(every=3, lr=1.0, momentum=0.0)"), run("local_sgd(every=3)"), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_one_worker_has_the_outer_step_alone() -> None:
    assert torch.equal(run(MULOCO, 1)[0], run("snoo(every=3, lr=0.7, momentum=0.5)", 1)[0])
    assert not torch.allclose(run(MULOCO, 1)[0], run("ddp()", 1)[0])


@pytest.mark.parametrize("at", [2, 3, 7])
def test_resume(at: int) -> None:
    def resumed(comm: offbeat.Communicator) -> Tensor:
        first = Worker(comm, MULOCO)
        first.go(0, at)
        second = Worker(comm, MULOCO)
        second.load(first.save())
        return second.go(at, 9)

    for mine, other in zip(offbeat.simulate(resumed, 3), run(MULOCO), strict=True):
        assert torch.equal(mine, other)
