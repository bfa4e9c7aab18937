"""Sharded models: each shard is averaged with its replicas, and the result is that of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Pool
from problems import data
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offbeat
from offbeat.engine.agreement import copy_state

pytestmark = pytest.mark.slow  # real processes, many of them

METHODS = [
    "ddp()",
    "local_sgd(every=2)",
    "local_sgd(every=2, delay=1)",
    "local_sgd(every=2, moments='average')",
    "post_local_sgd(switch=2, every=2)",
    "qsr(alpha=0.5, base=2)",
    "ssd_sgd(every=2, warmup=1, server=SGD(lr=1.0, momentum=0.5))",
]
SAVED, STEPS = 3, 5


def build() -> nn.Module:
    """Odd sizes, so that shards are uneven, and a layer smaller than the number of shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def loop(
    model: nn.Module, sync: offbeat.Synchronizer, opt: torch.optim.Optimizer, seed: int, steps: range
) -> None:
    for step in steps:
        model(data(seed, step).double()).square().sum().backward()
        sync.step()
        opt.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def sharded(comm: offbeat.Communicator, expression: str) -> list[list[dict[str, Tensor]]]:
    """Weights after every step, in `averaged()` and after `finish()`: of one run, and of it resumed."""
    mesh = mesh_of_four()
    replica = mesh["replica"].get_local_rank()

    def make() -> tuple[nn.Module, torch.optim.Optimizer, offbeat.Synchronizer]:
        model = build()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, opt, offbeat.method(expression)(model, opt, group=mesh["replica"])

    def go(run: tuple[nn.Module, torch.optim.Optimizer, offbeat.Synchronizer], steps: range) -> Any:
        model, opt, sync = run
        for step in steps:
            loop(model, sync, opt, replica, range(step, step + 1))
            yield weights(model)

    def end(run: tuple[nn.Module, torch.optim.Optimizer, offbeat.Synchronizer]) -> Any:
        model, _, sync = run
        with sync.averaged():
            yield weights(model)
        sync.finish()
        yield weights(model)

    run, again = make(), make()
    first = [*go(run, range(SAVED))]
    states = copy_state([part.state_dict() for part in run])
    whole = [*first, *go(run, range(SAVED, STEPS)), *end(run)]
    for part, state in zip(again, states, strict=True):
        part.load_state_dict(state)
    return [whole, [*first, *go(again, range(SAVED, STEPS)), *end(again)]]


def unsharded(comm: offbeat.Communicator, expression: str) -> list[dict[str, Tensor]]:
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = offbeat.method(expression)(model, opt, group=comm)
    trace = []
    for step in range(STEPS):
        loop(model, sync, opt, comm.rank, range(step, step + 1))
        trace.append(weights(model))
    with sync.averaged():
        trace.append(weights(model))
    sync.finish()
    return [*trace, weights(model)]


@pytest.mark.parametrize("expression", METHODS)
def test_two_replicas_of_two_shards(pool: Pool, expression: str) -> None:
    expected = offbeat.simulate(lambda comm: unsharded(comm, expression), 2)
    for rank, traces in enumerate(pool.run(sharded, expression)):
        for trace in traces:
            for mine, theirs in zip(trace, expected[rank // 2], strict=True):
                for name in theirs:
                    torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-12)


def bytes_sent(comm: offbeat.Communicator) -> tuple[int, int]:
    mesh = mesh_of_four()
    model = nn.Linear(8, 4, bias=False)
    fully_shard(model, mesh=mesh["shard"])
    sync = offbeat.local_sgd(
        model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, group=mesh["replica"]
    )
    model(torch.ones(1, 8)).sum().backward()
    sync.step()
    (report,) = sync.reports
    return report.workers, report.bytes_sent


def test_each_rank_sends_its_own_shard(pool: Pool) -> None:
    """Half of 32 values of four bytes in an all-reduce of two, a header of eight words, drift and loss."""
    assert pool.run(bytes_sent) == [(2, 64 + 64 + 16)] * 4


def two_axes(comm: offbeat.Communicator) -> str:
    mesh = mesh_of_four()
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="the mesh must have one axis, not 2: pass mesh\\['replica'\\]"):
        offbeat.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), group=mesh)
    return str(dist.get_backend(mesh.get_group("replica")))


def test_a_mesh_of_two_axes(pool: Pool) -> None:
    assert pool.run(two_axes) == ["gloo"] * 4
