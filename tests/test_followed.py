"""Buffers that follow rank 0 go in one message per dtype, however many a model has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import offbeat
from offbeat.comm.collective import BROADCAST, Collective
from offbeat.comm.communicator import Wrapped
from offbeat.comm.throttled import LinkQueue
from offbeat.engine.extras import Buffers
from offbeat.plan.recording import RecordingComm, count_sent
from offbeat.tasks.pictures import build_resnet


class Counting(Wrapped):
    """Notes the dtype of every tensor that is broadcast, which is a message of its own."""

    def __init__(self, comm: offbeat.Communicator) -> None:
        super().__init__(comm)
        self.sent: Counter[str] = Counter()

    def wrap(self, comm: offbeat.Communicator) -> offbeat.Communicator:
        return comm

    def run(
        self, kind: Collective, tensors: Sequence[Tensor], *, src: int = 0, control: bool = False
    ) -> offbeat.Pending[list[Tensor]]:
        if kind is BROADCAST:
            self.sent.update(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        return super().run(kind, tensors, src=src, control=control)


def rounds(comm: offbeat.Communicator, method: str) -> tuple[list[dict[str, int]], list[int], list[Tensor]]:
    """What each of three steps broadcasts on a network with nine normalizations, the bytes, the buffers."""
    model = build_resnet((4, 8), 2, classes=3, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counting, sent = Counting(comm), []
    sync = offbeat.method(method)(model, optimizer, group=counting)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * comm.rank + step)
        model(torch.rand(4, 3, 8, 8, generator=generator)).square().mean().backward()
        sync.step()
        optimizer.zero_grad()
        sent.append(dict(counting.sent))
        counting.sent.clear()
    buffers = [buffer.clone() for buffer in model.buffers()]
    return sent, [report.bytes_sent for report in sync.reports], buffers


MESSAGES = pytest.mark.parametrize(
    ("method", "messages"),
    [
        ("ddp()", {"float32": 1, "int64": 1}),
        ("local_sgd(every=1, delay=1, buffers='follow')", {"float32": 1, "int64": 1}),
        ("diloco(every=8, warmup=8)", {"float32": 1, "int64": 1}),
        ("local_sgd(every=1)", {"int64": 1}),  # floating buffers are averaged with the weights
        ("local_sgd(every=1, buffers='follow')", {"float32": 1, "int64": 1}),
        ("local_sgd(every=1, buffers='keep')", {}),
    ],
)


@MESSAGES
def test_a_round_broadcasts_once_per_dtype(pool: Pool, method: str, messages: dict[str, int]) -> None:
    real = pool.run(rounds, method, workers=2)
    simulated = offbeat.simulate(lambda comm: rounds(comm, method), 2)
    for sent, moved, buffers in (*real, *simulated):
        assert sent[1:] == [messages] * 2  # the first step also gives out rank 0's weights
        assert moved == real[0][1]
        if messages:
            assert buffers[2].tolist() == 3  # a count of batches
    if "float32" in messages and "delay" not in method:
        for mine, first in zip(real[1][2], real[0][2], strict=True):
            assert torch.equal(mine, first)


def count(comm: offbeat.Communicator, method: str, look: Callable[[], list[int]]) -> list[list[int]]:
    """What is seen after the second and the third of three steps; the first gives out rank 0's weights."""
    model = build_resnet((4, 8), 2, classes=3, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.method(method)(model, optimizer, group=comm)
    seen = []
    for _ in range(3):
        model(torch.ones(4, 3, 8, 8)).square().mean().backward()
        sync.step()
        optimizer.zero_grad()
        seen.append(look())
    return seen[1:]


def noting(call: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The same call, which leaves a note of itself."""

    def noted(*args: Any, **options: Any) -> Any:
        calls.append(call)
        return call(*args, **options)

    return noted


def count_real(comm: offbeat.Communicator, method: str) -> list[list[int]]:
    """The messages that an emulated link has let pass, and the broadcasts that gloo was asked for."""
    passed: list[Any] = []
    broadcasts: list[Any] = []
    link = LinkQueue(1e12, 0.0, 0)
    link.hold = noting(link.hold, passed)  # type: ignore[method-assign]

    def look() -> list[int]:
        seen = [len(passed), len(broadcasts)]
        passed.clear()
        broadcasts.clear()
        return seen

    with pytest.MonkeyPatch.context() as patch:
        for group in (dist.ProcessGroup, dist.ProcessGroupGloo):
            patch.setattr(group, "broadcast", noting(group.broadcast, broadcasts))
        return count(offbeat.Throttled(comm, rate=1e12, link=link), method, look)


def count_planned(method: str) -> list[list[int]]:
    """The messages that the plan writes down, and the broadcasts among them."""
    comm = RecordingComm(2)

    def look() -> list[int]:
        sent = [event for event, _ in count_sent(comm.log.take()) if not event.control]
        return [len(sent), sum(event.kind == BROADCAST.name for event in sent)]

    return count(comm, method, look)


@MESSAGES
def test_plan_and_emulated_link_count_the_messages_that_are_sent(
    pool: Pool, method: str, messages: dict[str, int]
) -> None:
    """The buffers of all dtypes are one message in both, for they are sent at the same time."""
    planned = count_planned(method)
    assert [broadcasts for _, broadcasts in planned] == [bool(messages)] * 2
    for real in pool.run(count_real, method, workers=2):
        assert [passed for passed, _ in real] == [sent for sent, _ in planned]
        assert [broadcasts for _, broadcasts in real] == [sum(messages.values())] * 2


class Odd(nn.Module):
    """Buffers of many kinds, filled from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        matrix = torch.rand(3, 4)
        self.register_buffer("plain", torch.rand(5))
        self.register_buffer("turned", matrix.t())
        self.register_buffer("cut", torch.rand(4, 4)[:, 1:3])
        self.register_buffer("scalar", torch.rand(()))
        self.register_buffer("mask", torch.rand(6) < 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("small", torch.randint(0, 9, (3,), dtype=torch.uint8))
        self.register_buffer("halves", torch.rand(3).half())
        self.register_buffer("brain", torch.rand(3).bfloat16())
        self.register_buffer("doubles", torch.rand(2).double())
        self.register_buffer("wave", torch.rand(2, 2, dtype=torch.complex64))
        self.register_buffer("empty", torch.rand(0, 3))
        self.register_buffer("none_at_all", torch.zeros(0, dtype=torch.int32))
        self.register_buffer("absent", None)


def followed(comm: offbeat.Communicator) -> tuple[dict[str, int], list[Tensor]]:
    model = Odd(comm.rank)
    counting = Counting(comm)
    buffers = Buffers(model, "follow")
    mine = {name: value.clone() for name, value in buffers.followed().items()}
    news = buffers.follow(counting).wait()
    for (name, value), new in zip(buffers.followed().items(), news, strict=True):
        assert torch.equal(value, mine[name])  # not before it lands
        assert (new.shape, new.dtype) == (value.shape, value.dtype), name
    return dict(counting.sent), news


def test_buffers_of_every_kind_follow(pool: Pool) -> None:
    expected = list(Buffers(Odd(0), "follow").followed().values())
    for sent, news in (*pool.run(followed, workers=3), *offbeat.simulate(followed, 3)):
        assert all(map(torch.equal, news, expected))
        assert max(sent.values()) == 1
        # Complex numbers go as pairs of reals; of no values at all nothing is sent.
        assert set(sent) == {"float32", "bool", "int64", "uint8", "float16", "bfloat16", "float64"}


def distributed(comm: offbeat.Communicator) -> tuple[dict[str, int], list[float]]:
    """Of a DTensor each worker sends its own part."""
    mesh, model, counting = init_device_mesh("cpu", (4,)), nn.Module(), Counting(comm)
    for name in ("one", "two"):
        part = torch.full((2,), float(comm.rank))
        model.register_buffer(name, DTensor.from_local(part, mesh, [Replicate()]))
    news = Buffers(model, "follow").follow(counting).wait()
    return dict(counting.sent), torch.cat(news).tolist()


def test_distributed_buffers_follow(pool: Pool) -> None:
    assert pool.run(distributed) == [({"float32": 1}, [0.0] * 4)] * 4
