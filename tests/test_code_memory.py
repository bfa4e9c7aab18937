"""What codes keep from round to round: a payload's layout and buffers change nothing that arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from test_codes import CODES, payload
from torch import Tensor

import offbeat
from offbeat import Clock, ErrorFeedback, Quantized, TopK
from offbeat.base.clock import State
from offbeat.base.packed import Packed
from offbeat.comm.collective import SUM, Collective
from offbeat.comm.communicator import Communicator, Pending, PendingList, Tensors
from offbeat.reduce.code import Messages
from offbeat.reduce.rounded import mean_in_two_phases
from offbeat.reduce.vectors import Vector
from offbeat.reduce.wire import BlockCodec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_kept_payload_is_like_a_new_one(code: offbeat.Code, dtype: torch.dtype) -> None:
    """Five rounds: among four, among pairs, and after a residual has been replaced by a copy."""

    def work(comm: Communicator, room: Callable[[], Packed]) -> list[Tensor]:
        fed, pairs, heard = ErrorFeedback(code), comm.split([[0, 1], [2, 3]]), list[Tensor]()
        state = fed.init()
        for round, peers in enumerate([comm, comm, pairs, comm, comm]):
            sent = room()
            sent.read(list(payload(comm.rank, round, dtype).values()))
            if round == 4:
                state["residual"][0] = state["residual"][0].clone()  # in the same list
            arrived = fed.start(sent, peers, Clock(round + 1, round, 0.1), state).wait()
            heard += [view.clone() for view in arrived.views] + [left.clone() for left in state["residual"]]
        return heard

    def keep(comm: Communicator) -> list[Tensor]:
        room = Packed.like(payload(0, 0, dtype))
        return work(comm, lambda: room)

    def renew(comm: Communicator) -> list[Tensor]:
        return work(comm, lambda: Packed.like(payload(0, 0, dtype)))

    for kept, new in zip(offbeat.simulate(keep, 4), offbeat.simulate(renew, 4), strict=True):
        assert [torch.equal(a, b) for a, b in zip(kept, new, strict=True)] == [True] * len(new)


@dataclass(frozen=True, repr=False)
class Counting(offbeat.Code):
    """An exact mean that counts its rounds in a buffer."""

    number: int = 0

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        count = vector.buffer("count", (1,), torch.float32)
        count += 1
        (mean,) = yield comm.mean([vector.values.clone()])
        vector.values.copy_(mean)
        state["seen"] = int(count)


def test_buffers_outlast_another_code() -> None:
    def worker(comm: Communicator) -> list[int]:
        room, seen = Packed.like({"x": torch.zeros(2048)}), list[int]()
        for round in range(4):
            state: State = {}
            room.read([torch.ones(2048)])
            Counting(round % 2).start(room, comm, Clock(round + 1, round, 0.1), state).wait()
            seen.append(state["seen"])
        return seen

    assert offbeat.simulate(worker, 2) == [[1, 2, 3, 4]] * 2


@dataclass(frozen=True, repr=False)
class Scratch(offbeat.Code):
    """Sends half of the values, and uses a buffer for something else."""

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        assert vector.residual is not None
        for name in ("values", "residual", "narrow", "lost"):
            vector.buffer(name, tuple(vector.values.shape), torch.float32).fill_(99.0)
        torch.mul(vector.values, 0.5, out=vector.residual)
        (mean,) = yield comm.mean([vector.values * 0.5])
        vector.values.copy_(mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_buffers_of_a_code_are_its_own(dtype: torch.dtype) -> None:
    """What is kept: 1/2, then half of 1 + 1/2, and half of 1 + 3/4."""

    def worker(comm: Communicator) -> tuple[list[float], float]:
        room, fed, heard = Packed.like({"x": torch.zeros(2048, dtype=dtype)}), ErrorFeedback(Scratch()), []
        state = fed.init()
        for round in range(3):
            room.read([torch.ones(2048, dtype=dtype)])
            mean = fed.start(room, comm, Clock(round + 1, round, 0.1), state).wait()
            heard.append(float(mean.flats[0].mean()))
        return heard, float(state["residual"][0].mean())

    assert offbeat.simulate(worker, 2) == [([0.5, 0.75, 0.875], 0.875)] * 2


def test_a_layout_is_that_of_the_code() -> None:
    """Tensors of 1 500 values are coded at first, and exact afterwards."""

    def worker(comm: Communicator) -> list[float]:
        room, lost = Packed.like({"x": torch.zeros(1500)}), list[float]()
        for round, least in enumerate([1024, 2048, 1024]):
            values = torch.randn(1500, generator=torch.Generator().manual_seed(round))
            room.read([values])
            heard = Quantized(2, least=least).start(room, comm, Clock(round + 1, round, 0.1), {}).wait()
            lost.append(float((heard.views[0] - values).norm() / values.norm()))
        return lost

    coded, exact, again = offbeat.simulate(worker, 2)[0]
    assert coded > 0.1
    assert exact == 0
    assert again > 0.1


@dataclass(frozen=True, repr=False)
class Flipped(offbeat.Code):
    """Rounds the values in reverse order, from other memory each time."""

    messages = 2

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        turned = replace(vector, values=vector.values.flip(0), residual=None, exact=None)
        yield from mean_in_two_phases(turned, comm, BlockCodec(8, 256))
        vector.values.copy_(turned.values.flip(0))


def test_views_of_one_memory_are_not_used_for_another() -> None:
    """Round r: the mean of r + 1 and r + 2."""

    def worker(comm: Communicator) -> list[float]:
        room, heard = Packed.like({"x": torch.zeros(2048)}), list[float]()
        for round in range(3):
            room.read([torch.full((2048,), float(round + 1 + comm.rank))])
            mean = Flipped().start(room, comm, Clock(round + 1, round, 0.1), {}).wait()
            heard.append(float(mean.flats[0].mean()))
        return heard

    for heard in offbeat.simulate(worker, 2):
        assert heard == pytest.approx([1.5, 2.5, 3.5], rel=2**-7)


class Slow(Communicator):
    """Two ranks that send the same. A sum is written in place when it is waited for, or by `land`."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sums = list[Callable[[], list[Tensor]]]()

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        raise NotImplementedError

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        if kind is not SUM:
            return Pending(lambda: [tensors[0].clone() for _ in range(2)], lambda: True, lambda: 0.0)
        sent, landed = [tensor.clone() for tensor in tensors], list[bool]()

        def land() -> list[Tensor]:
            if not landed:
                landed.append(True)
                for tensor, value in zip(tensors, sent, strict=True):
                    tensor.copy_(2 * value)
            return list(tensors)

        self.sums.append(land)
        return Pending(land, lambda: bool(landed), lambda: 0.0)


def test_nothing_of_a_refused_round_lands_in_the_next() -> None:
    comm, room = Slow(), Packed.like({"x": torch.zeros(2048), "small": torch.zeros(3)})
    room.read([torch.full((2048,), float("nan")), torch.full((3,), 100.0)])
    with pytest.raises(offbeat.NotFinite):
        TopK(16).start(room, comm, Clock(1, 0, 0.1), {}).wait()
    room.read([torch.ones(2048), torch.full((3,), 7.0)])
    mean = TopK(16).start(room, comm, Clock(1, 0, 0.1), {})
    comm.sums[1]()
    comm.sums[0]()
    assert mean.wait().views[1].tolist() == [7.0, 7.0, 7.0]
