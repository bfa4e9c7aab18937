"""Real processes over gloo do what the simulation does."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import warm
from conftest import Pool
from problems import Dyadic, Realistic, data, optimizer_for, same, simulated, snapshot, train
from table import CODES, PULLED, ROUNDED, ROWS

import offbeat


def trained(
    comm: offbeat.Communicator, expression: str, options: dict[str, object]
) -> list[dict[str, torch.Tensor]]:
    return train(comm, expression, **options)


@pytest.mark.few(10)
@pytest.mark.parametrize("expression", ROWS)
def test_simulation_equals_gloo_to_the_bit(pool: Pool, expression: str) -> None:
    options = {"optimizer": "momentum"}
    real, virtual = pool.run(trained, expression, options), simulated(expression, **options)
    exact = 0 if expression in ROUNDED + PULLED else 10 if expression in CODES else 11
    for a, b in zip(real, virtual, strict=True):
        assert all(same(x, y) for x, y in zip(a[:exact], b[:exact], strict=True))
        for x, y in zip(a[exact:], b[exact:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
def test_other_world_sizes(pool: Pool, workers: int) -> None:
    real = pool.run(trained, "local_sgd(every=2)", {"steps": 2}, workers=workers)
    virtual = simulated("local_sgd(every=2)", workers=workers, steps=2)
    for a, b in zip(real, virtual, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_one_round_on_random_floats_agrees_to_rounding(pool: Pool) -> None:
    options = {"model": Realistic, "steps": 3, "optimizer": "momentum"}
    real = pool.run(seeded, "local_sgd(every=3)", options)
    virtual = offbeat.simulate(lambda comm: seeded(comm, "local_sgd(every=3)", options), 4)
    for a, b in zip(real, virtual, strict=True):
        for name in a[-1]:
            torch.testing.assert_close(a[-1][name], b[-1][name], rtol=1e-6, atol=1e-7)


def seeded(
    comm: offbeat.Communicator, expression: str, options: dict[str, object]
) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(comm.rank)
    return train(comm, expression, **options)


def beside_the_users_own(comm: offbeat.Communicator) -> tuple[float, bool]:
    """The user's collectives on the default group, while a message of ours is in flight."""
    net = Dyadic(comm.rank)
    opt = optimizer_for(net)
    total = torch.zeros(())
    with offbeat.local_sgd(net, opt, every=2, delay=2, group=comm) as sync:
        for step in range(6):
            net(data(comm.rank, step)).backward()
            sync.step()
            opt.zero_grad()
            ones = torch.ones(())
            dist.all_reduce(ones)
            total += ones
    return total.item(), same(snapshot(net), train(comm, "local_sgd(every=2, delay=2)", steps=6)[-1])


def test_the_users_collectives_do_not_mix_with_ours(pool: Pool) -> None:
    assert pool.run(beside_the_users_own) == [(24.0, True)] * 4


def through_the_default_group(comm: offbeat.Communicator) -> tuple[str, int]:
    net = Dyadic()
    first = offbeat.local_sgd(net, optimizer_for(net))
    second = offbeat.ddp(net, optimizer_for(net), group=dist.group.WORLD)
    shared = first.parts[0].peers.everyone is second.parts[0].peers.everyone
    return type(first.parts[0].peers.everyone).__name__, first.parts[0].peers.everyone.size if shared else 0


def test_without_a_group_it_is_the_default_one(pool: Pool) -> None:
    assert pool.run(through_the_default_group) == [("Torch", 4)] * 4


FORKING = """
import os, socket, warnings
import torch, torch.distributed as dist, torch.multiprocessing as mp
import offbeat

warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork

def averaged(rank, size, port):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    value = offbeat.Torch(timeout=120).mean([torch.full((3,), float(rank))]).wait()[0]
    assert value.tolist() == [(size - 1) / 2] * 3
    dist.destroy_process_group()

def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

averaged(0, 1, port())
where, fork = port(), mp.get_context("fork")
children = [fork.Process(target=averaged, args=(rank, 2, where)) for rank in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
raise SystemExit(sum(child.exitcode != 0 for child in children))
"""


@pytest.mark.slow
def test_forked_processes_have_connections_of_their_own() -> None:
    done = warm.run("-c", FORKING)
    assert done.returncode == 0, done.stderr


def fail_and_try_again(comm: offbeat.Communicator) -> list[float]:
    """All workers fail in a run on the default group, and make another; rank 0 keeps the others waiting."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with suppress(KeyError), offbeat.local_sgd(model, optimizer, every=1) as sync:
        raise KeyError("a user's own")
    with offbeat.local_sgd(model, optimizer, every=1) as sync:
        model(torch.ones(1, 2)).sum().backward()
        if comm.rank == 0:
            time.sleep(2.5)  # until the others look why
        sync.step()
        return model.weight.flatten().tolist()


def test_a_run_that_failed_does_not_spoil_the_next_one(pool: Pool) -> None:
    answers = pool.run(fail_and_try_again, fresh=True)
    assert answers == answers[:1] * len(answers)
