"""Codes: what arrives, what it costs, what is left behind, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import Pool
from sentences import says
from torch import Tensor

import offbeat
from offbeat import Clock, ErrorFeedback, LowRank, Mean, Metered, Quantized, RandomBlock, TopK, TwoLevel
from offbeat.base.packed import Packed
from offbeat.reduce import rounded
from offbeat.reduce.sparse import largest, pack12, pack16, pack_levels, unpack12, unpack16, unpack_levels
from offbeat.reduce.wire import BlockCodec, find_scales, pack, unpack

CODES = [
    Mean("bfloat16"),
    Mean(torch.float16),
    Quantized(8),
    Quantized(4),
    Quantized(3),
    Quantized(2, block=8),
    Quantized(4, block=64, stochastic=True),
    TopK(8),
    TopK(16, chunk=64),
    TopK(64, chunk=4096, bits=2),
    TopK(4, bits=2),
    RandomBlock(8),
    LowRank(2),
]
SHAPES = {"first": (70, 40), "bias": (40,), "second": (1500,), "third": (3, 7, 101), "+buffer": (2000,)}


def payload(rank: int, round: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 * rank + round)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}


def reduce(
    comm: offbeat.Communicator, code: offbeat.Reducer, tensors: list[dict[str, Tensor]], state: Any = None
) -> list[dict[str, Tensor]]:
    """What arrives, round by round."""
    room, state = Packed.like(tensors[0]), code.init() if state is None else state
    heard = []
    for round, given in enumerate(tensors):
        room.read(list(given.values()))
        clock = Clock(step=round + 1, round=round, lr=0.1)
        heard.append(code.start(room, comm, clock, state).wait().tensors())
    return heard


def mean_of(payloads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([p[name].double() for p in payloads]).mean(0) for name in payloads[0]}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_all_ranks_get_the_same_and_small_tensors_and_riders_the_exact_mean(
    code: offbeat.Code, workers: int
) -> None:
    heard = offbeat.simulate(lambda comm: reduce(comm, code, [payload(comm.rank, 0)])[0], workers)
    mean = mean_of([payload(rank, 0) for rank in range(workers)])
    for name in SHAPES:
        assert all(torch.equal(other[name], heard[0][name]) for other in heard)
    lost = {name: (heard[0][name] - mean[name]).norm() / mean[name].norm() for name in SHAPES}
    assert lost["bias"] < 1e-6
    assert lost["+buffer"] < 1e-6
    assert (lost["first"] > 1e-6) == (workers > 1)  # it is a lossy code, but alone nothing is sent


def test_real_workers_decode_what_simulated_ones_do(pool: Pool) -> None:
    rounded = [*map(Quantized, (8, 4, 3, 2)), Mean("bfloat16")]
    for code in (*rounded, TopK(8), TopK(64, chunk=4096, bits=2)):
        real = pool.run(one_round, code, workers=3)
        virtual = offbeat.simulate(lambda comm, code=code: one_round(comm, code), 3)
        for a, b in zip(real, virtual, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in ("first", "second", "third"))


@pytest.mark.parametrize("code", [Mean("bfloat16"), *map(Quantized, (8, 4, 3, 2))], ids=str)
def test_slices_sent_in_pieces_arrive_as_in_one(code: offbeat.Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of odd lengths, the last slice and its pieces shorter; the residuals too."""

    def worker(comm: offbeat.Communicator) -> tuple[list[Tensor], int]:
        g = torch.Generator().manual_seed(comm.rank)
        given = [{"x": torch.randn(9_973, generator=g)} for _ in range(2)]
        feed, metered = ErrorFeedback(code), Metered(comm)
        state = feed.init()
        heard = reduce(metered, feed, given, state)
        return [*[round["x"] for round in heard], *state["residual"]], metered.sent

    whole = offbeat.simulate(worker, 3)
    monkeypatch.setattr("offbeat.reduce.rounded._PIECE", 1024)
    gathers = []
    monkeypatch.setattr(Metered, "gather", lambda self, t: gathers.append(t) or self.comm.gather(t))
    for (a, _), (b, _) in zip(whole, offbeat.simulate(worker, 3), strict=True):
        assert all(map(torch.equal, a, b))
    assert len(gathers) > 2 * 3 * 2


def test_real_workers_send_pieces_as_simulated_ones_do(pool: Pool) -> None:
    real = pool.run(long_round, workers=2)
    virtual = offbeat.simulate(long_round, 2)
    assert all(map(torch.equal, real, virtual))


def long_round(comm: offbeat.Communicator) -> Tensor:
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(comm.rank))
    return reduce(comm, Quantized(8), [{"x": x}])[0]["x"]


def one_round(comm: offbeat.Communicator, code: offbeat.Code) -> dict[str, Tensor]:
    return reduce(comm, code, [payload(comm.rank, 0)])[0]


@dataclass(frozen=True, repr=False)
class Twice(offbeat.Code):
    """The mean, and for the first vector of a payload the mean of that."""

    messages = 2

    def carry(self, vector: Any, comm: offbeat.Communicator, clock: Clock, state: Any) -> Any:
        (mean,) = yield comm.mean([vector.values.clone()])
        if vector.index == 0:
            (mean,) = yield comm.mean([mean])
        vector.values.copy_(mean)


def test_one_vector_may_take_more_messages_than_another() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[int, float, float]:
        given = {"a": torch.full((1500,), float(comm.rank)), "b": torch.full((1500,), 2 * comm.rank).double()}
        room = Packed.like(given)
        room.read(list(given.values()))
        message = Twice().start(room, comm, Clock(step=1, round=0, lr=0.1), {})
        message.advance()
        heard = message.wait().tensors()
        return message.stages, heard["a"].mean().item(), heard["b"].mean().item()

    assert offbeat.simulate(worker, 2) == [(0, 0.5, 1.0)] * 2


@pytest.mark.parametrize("code", ["Quantized(8)", "LowRank(2)", "TopK(4)"])
def test_a_delayed_code_beside_a_vector_of_another_type_below_its_least(code: str) -> None:
    """Five float64 values are too few for the code: their mean is exact."""

    def worker(comm: offbeat.Communicator) -> tuple[list[float], Tensor]:
        net = torch.nn.Linear(50, 30)
        net.scale = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        opt = torch.optim.SGD(net.parameters(), lr=0.125)
        with offbeat.method(f"local_sgd(every=4, delay=2, reduce={code})")(net, opt, group=comm) as sync:
            for _ in range(10):
                ((1 + 2 * comm.rank) * (net(torch.ones(50)).mean() + net.scale.sum())).backward()
                sync.step()
                opt.zero_grad()
        return net.scale.tolist(), net.weight.detach()

    (scale, weight), *others = offbeat.simulate(worker, 2)
    assert scale == [-0.125 * 10 * 2] * 5
    assert all(other == scale and torch.equal(same, weight) for other, same in others)


@pytest.mark.parametrize("size", [1, 7, 8, 63, 257, 1000])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_quantized_values_are_within_half_a_step_each_way(bits: int, size: int) -> None:
    workers, block, low = 3, 16, 2 ** (bits - 1)
    given = [
        {"x": torch.randn(size, generator=torch.Generator().manual_seed(rank))} for rank in range(workers)
    ]

    def half_step(values: Tensor, off: float = 0.0) -> float:
        """Of a block whose values are known to within `off`; a scale in bfloat16 is up to 2⁻⁷ larger."""
        small, big = sorted([float(values.max().clamp(min=0)), float(-values.min().clamp(max=0))])
        return max((big + off) / low, (small + off) / (low - 0.51)) * (1 + 2**-7) / 2

    code = Quantized(bits, block=block, least=1)
    (heard, *_) = offbeat.simulate(lambda comm: reduce(comm, code, [given[comm.rank]])[0], workers)
    mean = mean_of(given)["x"].float()
    for start in range(0, size, block):  # blocks lie at multiples of their length in every slice
        part = slice(start, start + block)
        out = sum(half_step(rank["x"][part]) for rank in given) / workers
        bound = out + half_step(mean[part], out)
        assert (heard["x"][part] - mean[part]).abs().max() <= bound * 1.0001
    assert torch.unique(heard["x"][:block]).numel() <= 2**bits


def through(values: list[float], bits: int) -> list[float]:
    """What is decoded of one block."""
    codec = BlockCodec(bits, len(values))
    wire, out = torch.zeros(codec.width, dtype=torch.uint8), torch.zeros(len(values))
    codec.encode(torch.tensor(values), codec.open(wire))
    codec.decode(codec.open(wire), out)
    return out.tolist()


def test_blocks_by_hand() -> None:
    """The value of largest magnitude is number −8, so the scale is −1: 3.4 becomes −3, −7.4 becomes 7."""
    values = [8.0, 3.4, -1.6, 0.4, -7.4, 0.0, 0.5, 1.5]
    assert through(values, 4) == [8, 3, -2, 0, -7, 0, 0, 2]
    assert through([-x for x in values], 4) == [-8, -3, 2, 0, 7, 0, 0, -2]
    # Number 8 does not exist: −7.8 needs the scale 7.8/7.49 ≈ 1.041, in bfloat16 1.046875, rounded up.
    assert through([8.0, -7.8, *[0.0] * 6], 4) == [8 * 1.046875, -7 * 1.046875, *[0] * 6]
    # Scale 2: all numbers are −4 … 3, or −2 … 1.
    assert through([-8.0, 6.9, 5.2, 3.0, 1.2, -1.2, 0, -5.2] * 2, 3) == [-8, 6, 6, 4, 2, -2, 0, -6] * 2
    assert through([-4.0, 2.9, 1.2, 0.9, -0.9, -1.2, -2.9, 0], 2) == [-4, 2, 2, 0, 0, -2, -2, 0]
    assert through([128.0, *[0.6] * 7], 8) == [128, *[1] * 7]


def test_scales_are_never_zero() -> None:
    for top in (0.0, 1e-45, 1e-38):
        scale = find_scales(torch.tensor([[top, *[0.0] * 7]]), 4, at_random=False)
        assert scale.item() == -(2.0**-126)
        assert scale.reciprocal().isfinite()


def test_the_largest_draw_stays_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 + (1 − 2⁻²⁴) is 8 in float32, and number 8 does not exist."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2.0**-24))
    codec, out = BlockCodec(4, 8), torch.zeros(8)
    wire = torch.zeros(codec.width, dtype=torch.uint8)
    codec.encode(torch.tensor([-8.0, 7, -8, 7, 0, 0, 0, 0]), codec.open(wire), torch.Generator())
    codec.decode(codec.open(wire), out)
    assert out.tolist() == [-7, 7, -7, 7, 0, 0, 0, 0]


def test_a_rank_does_not_round_what_it_sums_itself() -> None:
    """Rank 0 sums the first block: (1.8 + round(1.3)) / 2 = 1.4, sent as 1. It keeps 2 · 0.4, rank 1 0.3.

    In the next round nothing is new: what is kept, (0.8 + 0.3) / 2, is alone in its block and arrives.
    """
    code = ErrorFeedback(Quantized(4, block=8, least=1))
    given = [[8.0, 1.8, *[0.0] * 14], [8.0, 1.3, *[0.0] * 14]]

    def worker(comm: offbeat.Communicator) -> tuple[list[float], list[float], float]:
        state = code.init()
        (first,) = reduce(comm, code, [{"x": torch.tensor(given[comm.rank])}], state)
        left = state["residual"][0][:2].tolist()
        (second,) = reduce(comm, code, [{"x": torch.zeros(16)}], state)
        return first["x"][:2].tolist(), left, float(second["x"][1])

    (heard, own, later), (_, other, _) = offbeat.simulate(worker, 2)
    assert heard == [8, 1]
    assert own == pytest.approx([0, 0.8], abs=1e-5)
    assert other == pytest.approx([0, 0.3])
    assert later == pytest.approx(0.55, rel=2**-7)


@pytest.mark.parametrize("values", [8, 24, 60, 64, 200])
@pytest.mark.parametrize("code", [Quantized(4, block=8, least=1), Mean("bfloat16", least=1)], ids=repr)
def test_long_vectors_arrive_like_short_ones(code: Any, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long vector is coded where it lies, slice by slice; the last of four slices may be short or empty."""

    def worker(comm: offbeat.Communicator) -> list[Tensor]:
        g, fed = torch.Generator().manual_seed(comm.rank), ErrorFeedback(code)
        state = fed.init()
        given = [{"x": torch.randn(values, generator=g)} for _ in range(2)]
        return [*[heard["x"] for heard in reduce(comm, fed, given, state)], *state["residual"]]

    short = offbeat.simulate(worker, 4)
    monkeypatch.setattr(rounded, "_SHORT", 1)
    long = offbeat.simulate(worker, 4)
    assert all(
        torch.equal(a, b)
        for one, other in zip(short, long, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_numbers_without_gaps() -> None:
    numbers = {4: [-8, 7], 2: [-2, -1, 0, 1], 3: [-4, -3, -2, -1, 0, 1, 2, 3]}
    wires = {4: [[0xF0]], 2: [[0b11100100]], 3: [[byte] for byte in 0o76543210.to_bytes(3, "little")]}
    for bits, wire in wires.items():
        planes = torch.zeros(len(wire), 1, dtype=torch.uint8)
        pack(torch.tensor(numbers[bits], dtype=torch.int8), planes, bits)
        assert planes.tolist() == wire
    g = torch.Generator().manual_seed(0)
    for bits in (8, 4, 3, 2):
        low = 2 ** (bits - 1)
        given = torch.randint(-low, low, (5, 32), generator=g, dtype=torch.int8)
        planes = torch.zeros(3 if bits == 3 else 1, 5, 4 * bits // (3 if bits == 3 else 1), dtype=torch.uint8)
        pack(given.clone(), planes, bits)
        assert torch.equal(unpack(planes, bits), given)


@pytest.mark.parametrize(("bits", "lost"), [(8, 0.0071), (4, 0.087), (3, 0.178), (2, 0.388)])
def test_what_the_default_blocks_cost(bits: int, lost: float) -> None:
    """A scale of 16 bits for 32 values, or 256 with 8 bits; the relative error of normal values."""
    values = torch.randn(2**17, generator=torch.Generator().manual_seed(0))
    block = Quantized(bits).block
    assert block is not None
    codec = BlockCodec(bits, block)
    wire, out = torch.zeros(2**17 // block * codec.width, dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, codec.open(wire))
    codec.decode(codec.open(wire), out)
    assert 8 * wire.numel() / values.numel() == bits + 16 / (256 if bits == 8 else 32)
    assert 0.97 * lost < (out - values).norm() / values.norm() < lost


def test_narrow_casts_round_twice_and_sum_in_float32() -> None:
    """1 + 2⁻⁸ needs a ninth bit, which bfloat16 lacks; a sum in bfloat16 would lose the small ones."""
    values = [torch.tensor([256.0, 1 + 2**-8]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])]
    code = Mean("bfloat16", least=1)
    heard = offbeat.simulate(lambda comm: reduce(comm, code, [{"x": values[comm.rank]}])[0]["x"], 3)
    assert heard[0].tolist() == [86.0, 1.0]  # 258/3; in bfloat16 256 + 1 + 1 is 256, and 256/3 rounds to 85.5


@pytest.mark.slow
def test_stochastic_rounding_has_no_bias() -> None:
    """The mean error of n rounds stays below five standard deviations; rounding to the nearest does not."""
    rounds, step = 600, 1 / 7
    given = {"x": torch.tensor([1.0, -0.99, *[0.3 * step] * 4, -0.4 * step, 0.1 * step])}  # one block

    def bias(code: offbeat.Code, rounds: int) -> Tensor:
        heard = offbeat.simulate(lambda comm: reduce(comm, code, [given] * rounds), 2)[0]
        return (torch.stack([h["x"] for h in heard]).mean(0) - given["x"]).abs()

    # Two independent roundings there and one back, each with a variance of at most step²/4.
    bound = 5 * step * math.sqrt((1 / 8 + 1 / 4) / rounds)
    assert bias(Quantized(4, block=8, stochastic=True, least=1), rounds).max() < bound
    assert bias(Quantized(4, block=8, least=1), 2).max() > bound  # the same in all rounds


def test_draws_are_a_function_of_seed_round_and_rank() -> None:
    def heard(seed: int) -> list[dict[str, Tensor]]:
        code = Quantized(8, stochastic=True, seed=seed)
        return offbeat.simulate(lambda comm: reduce(comm, code, [payload(0, 0)] * 2), 2)[0]

    (first, second), again, other = heard(0), heard(0), heard(1)
    assert torch.equal(first["first"], again[0]["first"])
    assert not torch.equal(first["first"], second["first"])
    assert not torch.equal(first["first"], other[0]["first"])


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_error_feedback_loses_nothing_over_a_long_run(code: offbeat.Code, dtype: torch.dtype) -> None:
    """All that arrived plus what is left, averaged, is all that was given."""
    workers, rounds = 3, 40

    def worker(comm: offbeat.Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        feedback = ErrorFeedback(code)
        state = feedback.init()
        given = [payload(comm.rank, round, dtype) for round in range(rounds)]
        heard = reduce(comm, feedback, given, state)
        room = Packed.like(given[0])
        left = room.over(state["residual"]).tensors()
        return {name: sum(h[name].double() for h in heard) for name in SHAPES}, left

    answers = offbeat.simulate(worker, workers)
    total = mean_of(
        [
            {name: sum(payload(rank, r, dtype)[name].double() for r in range(rounds)) for name in SHAPES}
            for rank in range(workers)
        ]
    )
    left = mean_of([residual for _, residual in answers])
    for name in SHAPES:
        torch.testing.assert_close(answers[0][0][name] + left[name], total[name], rtol=0, atol=2e-4)
        assert bool(left[name].any()) == (name not in ("bias", "+buffer") and (name, str(code)) not in WHOLE)


WHOLE = {("second", str(LowRank(2)))}  # vectors have no rank


def test_decay_forgets() -> None:
    """With a half kept, what was never sent is worth 1 + 1/2 + 1/4 of what is given."""
    code = ErrorFeedback(RandomBlock(8, least=1), decay=0.5)

    def worker(comm: offbeat.Communicator) -> Tensor:
        state = code.init()
        reduce(comm, code, [{"x": torch.ones(8)}] * 3, state)
        return state["residual"][0]

    assert 1.75 in offbeat.simulate(worker, 2)[0].tolist()


def test_losses_longer_than_the_payload_are_shortened() -> None:
    """Tensor by tensor, to 0.375·√4 times the length: "a" to 3. "b" is shorter, "zero" has no length."""
    given = {"a": torch.tensor([4.0, 0, 0, 0]), "b": torch.full((4,), 8.0), "zero": torch.zeros(4)}
    lost = {"a": torch.full((4,), 6.0), "b": torch.full((4,), 6.0), "zero": torch.tensor([0.0, 6, 0, 0])}
    sent = {
        "a": torch.tensor([4.75, 0.75, 0.75, 0.75]),
        "b": torch.full((4,), 11.0),
        "zero": lost["zero"] / 2,
    }
    code = Quantized(8, block=8, least=1)

    def worker(comm: offbeat.Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        room, fed = Packed.like(given), ErrorFeedback(code, decay=0.5, limit=0.375)
        room.read(list(lost.values()))
        state = {**fed.init(), "residual": [flat.clone() for flat in room.flats]}
        (heard,) = reduce(comm, fed, [given], state)
        (expected,) = reduce(comm, code, [sent])
        return heard, expected

    for heard, expected in offbeat.simulate(worker, 4):
        assert all(torch.equal(heard[name], expected[name]) for name in given)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_loss_of_one_huge_gradient_does_not_bury_the_next(code: offbeat.Code) -> None:
    """By default, if the code rounds values. Other payloads, and other codes, keep everything."""

    def second(feedback: offbeat.Reducer) -> dict[str, Tensor]:
        def worker(comm: offbeat.Communicator) -> dict[str, Tensor]:
            spike = 1000 if comm.rank == 1 else 1
            given = {name: spike * tensor for name, tensor in payload(comm.rank, 0).items()}
            return reduce(comm, feedback, [given, payload(comm.rank, 1)])[1]

        return offbeat.simulate(worker, 2)[0]

    usual, unlimited = second(ErrorFeedback(code)), second(ErrorFeedback(code, decay=1.0, limit=1e9))
    gradients, halves = second(ErrorFeedback(code).for_gradients()), second(ErrorFeedback(code, 0.5, 0.5))
    exact = mean_of([payload(rank, 1) for rank in range(2)])
    for name in ("first", "second", "third"):
        assert torch.equal(usual[name], unlimited[name])
        assert torch.equal(gradients[name], (halves if isinstance(code, Quantized | Mean) else usual)[name])
        if isinstance(code, Quantized):
            errors = [float((found[name] - exact[name]).norm()) for found in (gradients, unlimited)]
            assert errors[0] < 2 * float(exact[name].norm()) < errors[1]


def test_defaults_for_gradients() -> None:
    """What is given stays; `ddp` and the hook take the defaults, exchanges of parameters do not."""
    code, net = Quantized(2), torch.nn.Linear(2, 1)
    for rounding in (code, Mean("bfloat16")):
        assert ErrorFeedback(rounding).for_gradients() == ErrorFeedback(rounding, decay=0.5, limit=0.5)
    assert ErrorFeedback(code, decay=0.9).for_gradients() == ErrorFeedback(code, decay=0.9, limit=0.5)
    assert ErrorFeedback(code, limit=2.0).for_gradients() == ErrorFeedback(code, decay=0.5, limit=2.0)
    assert ErrorFeedback(TopK(4)).for_gradients() == ErrorFeedback(TopK(4))
    (hook,) = offbeat.simulate(lambda comm: offbeat.ddp_hook(ErrorFeedback(code), group=comm).reducer, 1)
    assert hook == ErrorFeedback(code, decay=0.5, limit=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for name, reducer in (("ddp", ErrorFeedback(code, 0.5, 0.5)), ("local_sgd", ErrorFeedback(code))):
        sync = offbeat.method(name).but(reduce=ErrorFeedback(code))(net, optimizer)
        assert sync.parts[0].reduce == reducer


def test_bytes_by_hand() -> None:
    """4 workers, 4 096 values in one tensor, 10 in another."""
    given = {"large": torch.ones(4096), "small": torch.ones(10)}

    def sent(code: offbeat.Reducer) -> int:
        def worker(comm: offbeat.Communicator) -> int:
            meter = Metered(comm)
            reduce(meter, code, [given])
            return meter.sent

        return offbeat.simulate(worker, 4)[0]

    # A word of 8 bytes and 3 values of the small tensor, in 16 bytes, at the head of each message. 4 106
    # values are cut into 4 slices of 5 blocks of 256: numbers and scales, to the others and back. The first
    # message has a multiple of 8 bytes.
    assert sent(Quantized(8)) == 3 * (2 * (8 + 16 + 5 * (256 + 2)) + 6)
    assert sent(Quantized(4, block=256)) == 3 * (2 * (8 + 16 + 5 * (128 + 2)) + 6)
    # Or of 33 blocks of 32.
    assert sent(Quantized(4)) == 3 * (2 * (8 + 16 + 33 * (16 + 2)) + 6)
    assert sent(Quantized(3)) == 3 * (2 * (8 + 16 + 33 * (12 + 2)) + 2)
    assert sent(Quantized(2)) == 3 * (2 * (8 + 16 + 33 * (8 + 2)) + 6)
    assert sent(Mean("bfloat16")) == 2 * 3 * (8 + 16 + 1028 * 2)  # slices of 1 028
    extra = 3 * 64 + 60  # one word to each of the others, and the small tensor: 40 bytes × 2·3/4
    assert sent(TopK(64)) == extra + 3 * (4 + 2 * 64 + 4 * 64)  # a count, 64 places, 64 values
    # 64 of a chunk and all 10 of another in 12 bits, and a byte; one group: four levels, 256 bytes of codes.
    assert sent(TopK(64, chunk=4096, bits=2)) == extra + 3 * (112 + 16 + 256)
    assert sent(RandomBlock(64)) == extra + 2 * 3 * 64
    assert sent(TwoLevel()) == 3 * 64 + 3 * (24 + 2)
    assert sent(Mean()) == round(4106 * 4 * 1.5)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("code", [Quantized(4), Quantized(3), Quantized(8), Mean("bfloat16")], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4, 5, 1001])
def test_small_tensors_travel_exactly_in_the_messages_of_a_code(
    code: offbeat.Code, size: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an exchange and the first gather, whatever is small. Equal to a mean of their own."""
    monkeypatch.setattr(rounded, "_PIECE", 1 if pieces > 1 else rounded._PIECE)
    monkeypatch.setattr(rounded, "_PIECES", pieces)

    def worker(comm: offbeat.Communicator) -> tuple[list[str], dict[str, Tensor], list[Tensor]]:
        rng, kinds = torch.Generator().manual_seed(comm.rank), list[str]()
        small = {
            "a": torch.randn(size, generator=rng),
            "b": torch.randn(size, generator=rng, dtype=torch.float64),
            "+buffer": torch.full((3,), math.inf),
        }
        mean = comm.mean([tensor.clone() for tensor in small.values()]).wait()

        class Noted(Metered):
            def run(self, kind: Any, *given: Any, **options: Any) -> Any:
                kinds.append(kind.name)
                return super().run(kind, *given, **options)

        heard = reduce(Noted(comm), code, [{"large": torch.ones(4106), **small}])[0]
        return kinds, heard, mean

    for kinds, heard, mean in offbeat.simulate(worker, 4):
        assert kinds == ["exchange", *["gather"] * pieces]
        assert torch.equal(heard["large"], torch.ones(4106))
        for name, expected in zip(("a", "b", "+buffer"), mean, strict=True):
            assert torch.equal(heard[name], expected), name


def test_a_code_with_messages_of_its_own_need_not_send_small_tensors() -> None:
    """What a code inherits about its messages is not true of a `carry` of its own."""

    class Twice(Quantized):
        def carry(self, vector: Any, comm: Any, clock: Any, state: Any) -> Any:
            (values, *others) = yield comm.gather(vector.values)
            vector.values.copy_(torch.stack([values, *others]).mean(0))

    def worker(comm: offbeat.Communicator) -> dict[str, Tensor]:
        tensors = {"large": torch.full((2048,), 1.0 + comm.rank), "small": torch.full((3,), 1.0 + comm.rank)}
        return reduce(comm, Twice(8), [tensors])[0]

    for heard in offbeat.simulate(worker, 2):
        assert torch.equal(heard["large"], torch.full((2048,), 1.5))
        assert torch.equal(heard["small"], torch.full((3,), 1.5))


def test_low_rank_bytes_and_exactness() -> None:
    """A mean of rank 1 arrives as it is, in 2·(rows + columns) numbers."""
    left, right = torch.arange(1.0, 61), torch.arange(1.0, 41)
    given = [{"m": torch.outer(left, right) * factor} for factor in (1.0, 3.0)]

    def worker(comm: offbeat.Communicator) -> tuple[Tensor, int, Tensor]:
        meter, code = Metered(comm), LowRank(1)
        state = code.init()
        heard = reduce(meter, code, [given[comm.rank]] * 2, state)
        return heard[1]["m"], meter.sent // 2, state["factors"]["m"]

    heard, sent, factor = offbeat.simulate(worker, 2)[0]
    torch.testing.assert_close(heard, 2 * given[0]["m"], rtol=1e-5, atol=1e-3)
    assert sent == 64 + (60 + 40) * 4
    cosine = torch.nn.functional.cosine_similarity(factor.flatten(), right, dim=0)
    assert cosine.abs() > 0.99999


def test_low_rank_goes_on_from_the_last_round() -> None:
    g = torch.Generator().manual_seed(0)
    matrix = (
        torch.randn(50, 2, generator=g)
        @ torch.diag(torch.tensor([3.0, 2.0]))
        @ torch.randn(2, 40, generator=g)
    )
    given = [{"m": matrix + 0.3 * torch.randn(50, 40, generator=g)}] * 6
    heard = offbeat.simulate(lambda comm: reduce(comm, LowRank(2), given), 2)[0]
    errors = [float((h["m"] - given[0]["m"]).norm()) for h in heard]
    u, s, v = torch.linalg.svd(given[0]["m"])
    best = float((u[:, :2] @ torch.diag(s[:2]) @ v[:2] - given[0]["m"]).norm())
    assert errors[-1] < errors[0]
    assert errors[-1] < 1.0001 * best


def test_top_k_by_hand() -> None:
    """Two of eight each; what a worker did not send counts as zero."""
    given = [torch.tensor([8.0, 0, 0, 0, -6, 1, 0, 0]), torch.tensor([4.0, 0, 2, 0, 0, 1, 0, 0])]
    code = ErrorFeedback(TopK(4, least=1))

    def worker(comm: offbeat.Communicator) -> tuple[Tensor, Tensor]:
        state = code.init()
        heard = reduce(comm, code, [{"x": given[comm.rank]}], state)[0]["x"]
        return heard, state["residual"][0].clone()

    (heard, left), (_, other) = offbeat.simulate(worker, 2)
    assert heard.tolist() == [6, 0, 1, 0, -3, 0, 0, 0]
    assert left.tolist() == other.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(("length", "k"), [(4096, 64), (64, 4), (100, 3), (8, 8), (1000, 200)])
def test_largest(length: int, k: int) -> None:
    rows = torch.randn(37, length, generator=torch.Generator().manual_seed(k))
    found = largest(rows, k).sort(1).values
    assert torch.equal(found, rows.abs().topk(k, dim=1).indices.sort(1).values)


def test_packing() -> None:
    for length in (1, 2, 5, 1000):
        numbers = torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(length))
        assert torch.equal(unpack12(pack12(numbers), length), numbers)
        assert pack12(numbers).numel() == 3 * -(-length // 2)
        wide = 16 * numbers + 15
        assert torch.equal(unpack16(pack16(wide)), wide)


def test_levels_by_hand() -> None:
    """σ² = (16 + 9 + 7) / 9: the bins meet at −1.5σ ≈ −2.8, 0 and 2.8."""
    values = torch.tensor([4.0, 1, 2, -3, -1, -1, 0.5, 0.5, 0.5])
    heard = unpack_levels(pack_levels(values), 9)
    assert heard.tolist() == pytest.approx([4.0, 0.9, 0.9, -3, -1, -1, 0.9, 0.9, 0.9])
    # Zeros have a level of their own, and all below zero one; σ² = (16 + 9 + 7 + 0.25) / 7 of the others.
    values = torch.tensor([4.0, 1, 2, -3, -1, -1, 0.5, 0.0, -0.0, 0.0])
    heard = unpack_levels(pack_levels(values), 10)
    assert heard.tolist() == pytest.approx([4.0, 3.5 / 3, 3.5 / 3, *[-5 / 3] * 3, 3.5 / 3, 0, 0, 0])
    assert not unpack_levels(pack_levels(torch.zeros(5)), 5).any()
    assert unpack_levels(pack_levels(torch.full((3,), 3e38)), 3).tolist() == pytest.approx([3e38] * 3)


@pytest.mark.parametrize(
    "code", [TopK(64, chunk=4096, bits=2), TopK(64, chunk=8192, bits=2), TopK(4, bits=2)]
)
def test_two_bits_leave_zeros_alone(code: offbeat.Code) -> None:
    """Levels are shared by many, but what does not move on any worker stays where it is."""
    g = torch.Generator().manual_seed(0)
    still = {"still": torch.zeros(30_000), "moving": torch.randn(30_000, generator=g)}
    still["moving"][::3] = 0
    few = {"still": torch.zeros(5000), "moving": torch.cat([torch.randn(20, generator=g), torch.zeros(3000)])}
    for given in (still, few):
        heard = offbeat.simulate(lambda comm, given=given: reduce(comm, code, [given])[0], 2)
        for name, values in given.items():
            assert torch.equal(heard[0][name], heard[1][name])
            assert not heard[0][name][values == 0].any()
        assert heard[0]["moving"].any()


@pytest.mark.parametrize("bits", [2, 32])
@pytest.mark.parametrize("size", [1, 7, 4097, 4159, 4161, 8191])
def test_a_short_last_chunk_sends_what_it_has(size: int, bits: int) -> None:
    """Its last value, 30, is one of those kept, not 64 of them: the others keep their size."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values[-1] = 30.0
    code = ErrorFeedback(TopK(64, chunk=4096, bits=bits, least=1))

    def worker(comm: offbeat.Communicator) -> tuple[Tensor, Tensor]:
        state = code.init()
        return reduce(comm, code, [{"x": values}], state)[0]["x"], state["residual"][0]

    (heard, left), (other, _) = offbeat.simulate(worker, 2)
    assert torch.equal(heard, other)
    torch.testing.assert_close(heard + left, values, rtol=0, atol=1e-5)
    assert heard[-1] == pytest.approx(30.0)
    kept = heard != 0
    full, rest = divmod(size, 4096)
    assert kept.sum() == 64 * full + min(64, rest)
    assert heard[kept].abs().mean() == pytest.approx(float(values[kept].abs().mean()), rel=1e-4)


def test_random_blocks_wrap_around_and_come_to_every_place() -> None:
    given = [{"x": torch.arange(1.0, 11) * factor} for factor in (1.0, 3.0)]
    code = RandomBlock(3, seed=5, least=1)
    heard = offbeat.simulate(lambda comm: reduce(comm, code, [given[comm.rank]] * 40), 2)[0]
    seen = torch.zeros(10, dtype=torch.bool)
    wrapped = False
    for h in heard:
        chosen = h["x"] != 0
        assert chosen.sum() == 3
        assert torch.equal(h["x"][chosen], 2 * given[0]["x"][chosen])
        edges = int((chosen != chosen.roll(1)).sum())
        assert edges == 2  # one piece on a ring
        wrapped |= bool(chosen[0] and chosen[-1])
        seen |= chosen
    assert seen.all()
    assert wrapped


def test_two_levels_by_hand() -> None:
    """Rank 0: μ₊ 2, μ₋ 4. Rank 1: μ₊ 6, and nothing below. Means 4 and 2."""
    given = [{"x": torch.tensor([1.0, 3.0, -4.0])}, {"x": torch.tensor([6.0, 6.0, 6.0])}]
    heard = offbeat.simulate(lambda comm: reduce(comm, TwoLevel(), [given[comm.rank]])[0]["x"].tolist(), 2)
    assert heard == [[3.0, 5.0, -2.0], [4.0, 4.0, 4.0]]


def test_two_levels_keep_the_precision_they_are_given() -> None:
    """1 + 2⁻⁴⁰ needs more than float32; the mean of the two ranks is 2 + 2⁻⁴⁰."""
    given = [torch.full((5,), factor + 2.0**-40, dtype=torch.float64) for factor in (1.0, 3.0)]
    heard = offbeat.simulate(lambda comm: reduce(comm, TwoLevel(), [{"x": given[comm.rank]}])[0]["x"], 2)
    for values in heard:
        assert values.dtype == torch.float64
        assert values.tolist() == [2 + 2.0**-40] * 5


@pytest.mark.parametrize("code", [*CODES, TwoLevel()], ids=str)
def test_zeros_outliers_and_denormals(code: offbeat.Reducer) -> None:
    tiny = torch.full((1500,), 1e-45)
    outlier = torch.zeros(1500)
    outlier[77] = 6e4
    for values in (torch.zeros(1500), tiny, outlier):
        given = {"x": values.view(50, 30)}
        heard = offbeat.simulate(lambda comm, given=given: reduce(comm, code, [given])[0]["x"], 3)[0]
        assert heard.isfinite().all()
        if not isinstance(code, RandomBlock):  # which may not have come to it
            assert (heard - given["x"]).abs().max() <= 6e4 * 2**-7
        if not values.any():
            assert not heard.any()


def test_huge_values_do_not_overflow_the_sum() -> None:
    """With 2 bits, a block of 1 and −0.9 may decode 1 as 4/3."""
    most = 2.0**127
    mixed = torch.full((1500,), most)
    mixed[1::2] *= -0.9
    for code in (*map(Quantized, (8, 4, 3, 2)), Mean("bfloat16"), TopK(8)):
        for values in (torch.full((1500,), most), mixed):
            given = {"x": values}
            heard = offbeat.simulate(lambda comm, c=code, g=given: reduce(comm, c, [g])[0]["x"], 3)[0]
            assert heard.isfinite().all()


def sending(comm: offbeat.Communicator, expression: str, value: float) -> tuple[str, bool]:
    """Rank 1 comes to the second round with a bad value: what is said, and whether the weights were left."""
    net = torch.nn.Linear(50, 30)
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    sync = offbeat.method(expression)(net, opt, group=comm)
    for step in range(2):
        net.zero_grad()
        net(torch.ones(50)).sum().backward()
        if comm.rank == 1 and step == 1:
            sent = net.weight.grad if expression.startswith("ddp") else net.weight.detach()
            sent[3, 4] = value
        before = [p.detach().clone() for p in net.parameters()]
        try:
            sync.step()
        except offbeat.NotFinite as error:
            same = all(
                torch.equal(p.nan_to_num(), b.nan_to_num())
                for p, b in zip(net.parameters(), before, strict=True)
            )
            return str(error), same
    return "nothing", False


SENTENCE = (
    "Round 1 (step 2): 'weight' on rank 1 has a value that is NaN, infinite or beyond {}. "
    "No worker applied the round. Check that rank's loss, or clip its gradients."
)


@pytest.mark.parametrize(
    ("expression", "value", "most"),
    [
        ("ddp(reduce=Quantized(8))", math.nan, "1.7e+38"),
        ("ddp(reduce=Quantized(2))", 2e38, "1.7e+38"),
        ("ddp(reduce=TwoLevel())", math.inf, "3.4e+38"),
        ("ddp(reduce=Mean('float16'))", 70000.0, "6.55e+04"),
        ("local_sgd(every=1, reduce=ErrorFeedback(TopK(8)))", math.nan, "3.4e+38"),
        ("diloco(every=1, reduce=LowRank(2))", -math.inf, "3.4e+38"),
        ("def_sgd(ratio=8)", math.inf, "3.4e+38"),
    ],
)
def test_who_sends_no_number_is_named_everywhere_and_nothing_is_applied(
    expression: str, value: float, most: str
) -> None:
    answers = offbeat.simulate(lambda comm: sending(comm, expression, value), 3)
    assert answers == [(SENTENCE.format(most), True)] * 3


def test_real_workers_name_it_too(pool: Pool) -> None:
    answers = pool.attempt(sending, "ddp(reduce=ErrorFeedback(Quantized(4)))", math.nan)
    assert answers == [(SENTENCE.format("1.7e+38"), True)] * 4


def test_the_exact_mean_carries_infinities() -> None:
    """As GradScaler wants it: all workers see that a step overflowed."""
    assert offbeat.simulate(lambda comm: sending(comm, "ddp()", math.inf), 2) == [("nothing", False)] * 2


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (
            lambda: Quantized(5),
            ValueError,
            "Quantized(bits=5, block=None, stochastic=False, seed=0): bits must be 8, 4, 3 or 2.",
        ),
        (
            lambda: Quantized(8.0),  # type: ignore[arg-type]
            ValueError,
            "Quantized(bits=8.0, block=None, stochastic=False, seed=0): bits must be 8, 4, 3 or 2.",
        ),
        (
            lambda: Quantized(8, block=12),
            ValueError,
            "Quantized(bits=8, block=12, stochastic=False, seed=0): block must be a multiple of 8.",
        ),
        (
            lambda: Quantized(3, block=24),
            ValueError,
            "Quantized(bits=3, block=24, stochastic=False, seed=0): block must be a multiple of 16.",
        ),
        (
            lambda: Quantized(8, least=0),
            ValueError,
            "Quantized(bits=8, block=256, stochastic=False, seed=0, least=0): least is a number of values, "
            "at least 1.",
        ),
        (
            lambda: Mean("int8"),
            ValueError,
            'Mean(dtype=\'int8\'): dtype must be "bfloat16", "float16", or left out for full precision.',
        ),
        (
            lambda: TopK(0),
            ValueError,
            "TopK(ratio=0, chunk=None, bits=32): ratio must be a whole number, at least 1.",
        ),
        (
            lambda: TopK(64, chunk=32),
            ValueError,
            "TopK(ratio=64, chunk=32, bits=32): chunk must be a multiple of 8, at least ratio and at most "
            "65536.",
        ),
        (lambda: TopK(64, bits=3), ValueError, "TopK(ratio=64, chunk=None, bits=3): bits must be 32 or 2."),
        (
            lambda: RandomBlock(2.5),
            ValueError,
            "RandomBlock(ratio=2.5, seed=0): ratio must be a whole number, at least 1.",
        ),
        (lambda: LowRank(0), ValueError, "LowRank(rank=0, seed=0): rank must be at least 1."),
        (lambda: ErrorFeedback(Mean()), ValueError, "ErrorFeedback(Mean()): it loses nothing; use it alone."),
        (
            lambda: ErrorFeedback(TwoLevel()),
            TypeError,
            "ErrorFeedback(TwoLevel()): pass a code that knows what it loses, such as TopK(64).",
        ),
        (
            lambda: ErrorFeedback(LowRank(2), decay=0),
            ValueError,
            "ErrorFeedback(code=LowRank(rank=2, seed=0), decay=0): decay must be above 0 and at most 1.",
        ),
        (
            lambda: ErrorFeedback(LowRank(2), decay=True),
            ValueError,
            "ErrorFeedback(code=LowRank(rank=2, seed=0), decay=True): decay must be above 0 and at most 1.",
        ),
        (
            lambda: ErrorFeedback(LowRank(2), decay="1"),
            ValueError,
            "ErrorFeedback(code=LowRank(rank=2, seed=0), decay='1'): decay must be above 0 and at most 1.",
        ),
        (
            lambda: ErrorFeedback(LowRank(2), limit=0),
            ValueError,
            "ErrorFeedback(code=LowRank(rank=2, seed=0), limit=0): limit must be a positive "
            "number, such as 1e9 to keep everything, or None for the default.",
        ),
        (
            lambda: ErrorFeedback(LowRank(2), limit=True),
            ValueError,
            "ErrorFeedback(code=LowRank(rank=2, seed=0), limit=True): limit must be a positive "
            "number, such as 1e9 to keep everything, or None for the default.",
        ),
        (
            lambda: ErrorFeedback(LowRank(2), limit=float("inf")),
            ValueError,
            "ErrorFeedback(code=LowRank(rank=2, seed=0), limit=inf): limit must be a positive "
            "number, such as 1e9 to keep everything, or None for the default.",
        ),
        (
            lambda: offbeat.Detached(LowRank(2), lam=2),
            ValueError,
            "Detached(code=LowRank(rank=2, seed=0), lam=2): lam must be at least 0 and at most 1.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(make: Any, kind: type[Exception], sentence: str) -> None:
    with says(kind, sentence):
        make()


def test_weights_themselves_are_not_rounded() -> None:
    net = torch.nn.Linear(2, 2)
    every, params = offbeat.Every(2), offbeat.params(net)
    code = LowRank(2)
    with says(
        ValueError,
        "reduce=LowRank(rank=2, seed=0) with update=Replace(keep=0.0): the weights themselves would be "
        "rounded; send the difference from an anchor, with update=Outer(SGD(lr=1)), which also averages.",
    ):
        offbeat.Exchange(params, when=every, reduce=code)
    with pytest.raises(ValueError, match="the weights themselves would be rounded"):
        offbeat.Exchange(params, when=every, reduce=code, update=offbeat.Correct())
    for name in ("noloco", "overlap_local_sgd"):
        update = {"noloco": "Gossip", "overlap_local_sgd": "Overlap"}[name]
        why = f"{update} accepts no lossy code, because it sends the weights themselves"
        with says(ValueError, f"reduce=LowRank(rank=2, seed=0): {why}: leave reduce out."):
            offbeat.method(name).but(every=2, reduce=code)(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with says(ValueError, "reduce=TwoLevel(): workers get different results: use it for grads(model) only."):
        offbeat.Exchange(params, when=every, reduce=TwoLevel(), update=offbeat.Outer(offbeat.SGD(1.0)))
    detached = offbeat.Detached(code)
    with pytest.raises(ValueError, match="which has its own: leave reduce out"):
        offbeat.Exchange(params, when=every, reduce=code, update=detached)
