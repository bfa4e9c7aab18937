"""Workers that come and go, each of which is two processes with a sharded model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import processes
from ports import free_port
from problems import data
from test_elastic import A, Heard
from test_fsdp import build, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.comm.communicator import Communicator
from offbeat.elastic.lighthouse import load_torchft
from offbeat.elastic.scripted import Scripted

pytestmark = pytest.mark.slow  # four processes and more

STEPS, METHODS = 100, ["diloco(every=4)", "local_sgd(every=4, delay=2)"]


def train(model: Any, sync: offbeat.Synchronizer, replica: int, pause: float = 0.0) -> None:
    while sync.steps < STEPS:
        time.sleep(pause)
        model(data(replica, sync.steps).double()).square().sum().backward()
        sync.step()
        for optimizer in sync.optimizers:
            optimizer.zero_grad()


def make(expression: str, model: Any, group: Any) -> offbeat.Synchronizer:
    return offbeat.method(expression)(model, torch.optim.SGD(model.parameters(), lr=0.01), group=group)


def work(url: str, expression: str, replica: int, shard: int, port: int, said: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=shard, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        model = build()
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        group = offbeat.Elastic(url, least=1, name=f"{replica:04}", timeout=20)
        sync = make(expression, model, group)
        sync.on_report = lambda report: said.send((replica, shard, "round", report))
        with sync:
            sync.start()
            said.send((replica, shard, "started", sync.steps))
            train(model, sync, replica, 0.03)
        said.send((replica, shard, "end", {name: w.tolist() for name, w in weights(model).items()}))
        time.sleep(3)  # the other process still needs this one's store
    except BaseException as error:
        said.send((replica, shard, "failed", f"{type(error).__name__}: {error}"))
        raise


@pytest.mark.parametrize("expression", METHODS)
def test_a_worker_of_two_shards_is_lost_and_comes_back(expression: str) -> None:
    server = load_torchft().LighthouseServer
    light = server(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=1500)
    url, said = f"http://127.0.0.1:{light.address().rsplit(':', 1)[1]}", Heard(processes())
    heard: list[Any] = []
    jobs: list[Any] = []

    def start(replica: int) -> list[Any]:
        port = free_port()
        started = [said.start(work, url, expression, replica, shard, port) for shard in (0, 1)]
        jobs.extend(started)
        return started

    def until(enough: Any) -> None:
        while not enough():
            heard.append(said.get(timeout=60))
            assert heard[-1][2] != "failed", heard[-1]

    def rounds(workers: int) -> int:
        found = [r for replica, shard, kind, r in heard if (replica, shard, kind) == (0, 0, "round")]
        return sum(r.workers - r.joined == workers for r in found)

    try:
        start(0)
        lost = start(1)
        until(lambda: rounds(2) >= 2)
        for job in lost:
            job.kill()
        until(lambda: rounds(1) >= 1)
        start(2)
        until(lambda: sum(kind == "end" for _, _, kind, _ in heard) == 4)
    finally:
        for job in jobs:
            job.kill()
            job.join()
        light.shutdown()
    ends = [end for _, _, kind, end in heard if kind == "end"]
    assert all(end == ends[0] for end in ends)
    found = [r for replica, shard, kind, r in heard if (replica, shard, kind) == (0, 0, "round")]
    assert max(r.workers - r.joined for r in found[-3:]) == 2  # the new worker counts
    if "delay" in expression:
        return  # a round in the air is repeated where it lands
    # On a busy machine, either worker may start alone and make rounds before the other joins.
    made = {r.round: r for _, _, kind, r in heard if kind == "round"}
    before = {replica for replica, _, kind, steps in heard if kind == "started" and steps == 0}
    script = list[A]()
    for report in (made[number] for number in sorted(made)):
        members = {int(name.split(":")[0]) for name in report.members}
        script.append(A(sorted(members), sorted(members - before)))
        assert len(script[-1].joining) == report.joined
        before = members

    def worker(comm: Communicator) -> Any:
        model = build()
        sync = make(expression, model, Scripted(comm, script))
        try:
            with sync:
                sync.start()
                train(model, sync, comm.rank)
        except offbeat.PeerLost:
            return None
        return {name: w.tolist() for name, w in weights(model).items()}

    for name, value in offbeat.simulate(worker, 3)[0].items():
        torch.testing.assert_close(torch.tensor(ends[0][name]), torch.tensor(value), rtol=1e-9, atol=1e-12)
