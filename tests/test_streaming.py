"""Streaming DiLoCo: a model cut into fragments of whole layers, each with rounds of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from problems import Dyadic, Realistic
from slopes import Slopes, Walk, walked
from torch import nn

import offbeat
from offbeat.base.tensors import trainable
from offbeat.methods.parts import cut_into_fragments
from offbeat.tasks.bytes import SIZES, build_gpt


class Stack(nn.Module):
    """Blocks with something before, after and beside them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))  # a module's own parameters come before its children's
        self.embed = nn.Linear(2, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(blocks))
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)


class Tied(Stack):
    """The head is the embedding, and two blocks share a layer."""

    def __init__(self) -> None:
        super().__init__(4)
        self.embed = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.embed.weight
        self.blocks[3][0].weight = self.blocks[1][0].weight


class Frozen(Stack):
    """A frozen block is no layer."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1].requires_grad_(False)
        self.embed.weight.requires_grad_(False)


class Nested(nn.Module):
    """Lists of lists of modules; the longest has four members with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(2, 2) for _ in range(length)) for length in (2, 4, 1)
        )


class Giant(nn.Module):
    """Nearly everything in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(300, 300), nn.Linear(2, 2)])


class Bare(nn.Module):
    """No layers at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 2))


def compiled() -> nn.Module:
    """With the prefix that `torch.compile` puts before every name."""
    wrapper = nn.Module()
    wrapper._orig_mod = Stack(3)
    return wrapper


MODELS: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: Stack(5), 5),
    (Tied, 4),
    (Frozen, 4),
    (Nested, 4),
    (Giant, 3),
    (Bare, 1),
    (sequential, 3),
    (compiled, 3),
    (lambda: nn.Linear(2, 2), 1),
    (lambda: build_gpt(SIZES["tiny"], seed=0), 5),
    (lambda: build_gpt(SIZES["small"], seed=0), 5),
    (lambda: build_gpt(SIZES["large"], seed=0), 6),
    (Dyadic, 2),
    (Realistic, 3),
]
NAMES = (
    "stack tied frozen nested giant bare sequential compiled linear tiny small large dyadic realistic".split()
)


@pytest.mark.parametrize(("build", "most"), MODELS, ids=NAMES)
def test_fragments_are_disjoint_and_together_the_model(build: Callable[[], nn.Module], most: int) -> None:
    model = build()
    for number in range(1, most + 1):
        cut = cut_into_fragments(model, number)
        assert len(cut) == number
        assert all(cut)
        assert sorted(name for names in cut for name in names) == sorted(trainable(model))
        # The exchanges hold every parameter exactly once.
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = offbeat.streaming_diloco(model, opt, every=7, fragments=number)
        held = [id(p) for part in sync.parts for p in part.live.parameters]
        assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("build", "most"), MODELS, ids=NAMES)
def test_more_fragments_than_layers(build: Callable[[], nn.Module], most: int) -> None:
    model = build()
    sentence = f"the model has {most} layers with trainable parameters: choose between 1 and {most}."
    for number in (0, most + 1):
        with pytest.raises(ValueError, match=f"^fragments={number}: {re.escape(sentence)}$"):
            offbeat.streaming_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), fragments=number)


def test_layers_are_strided() -> None:
    """Layer i in fragment i mod F; what comes before the blocks in the first, after them in the last."""
    cut = [{name.rsplit(".", 1)[0] for name in names} for names in cut_into_fragments(Stack(5), 3)]
    assert cut == [
        {"scale", "embed", "blocks.0.0", "blocks.0.1", "blocks.3.0", "blocks.3.1"},
        {"blocks.1.0", "blocks.1.1", "blocks.4.0", "blocks.4.1"},
        {"blocks.2.0", "blocks.2.1", "norm", "head"},
    ]


def test_tied_parameters_belong_to_the_first_of_their_layers() -> None:
    cut = cut_into_fragments(Tied(), 4)
    assert "embed.weight" in cut[0]
    assert "blocks.1.0.weight" in cut[1]
    assert cut[3] == [
        "blocks.3.0.bias",
        "blocks.3.1.weight",
        "blocks.3.1.bias",
        "norm.weight",
        "norm.bias",
        "head.bias",
    ]


def test_frozen_layers_do_not_count() -> None:
    cut = cut_into_fragments(Frozen(), 3)
    assert cut[1] == ["blocks.2.0.weight", "blocks.2.0.bias", "blocks.2.1.weight", "blocks.2.1.bias"]


@pytest.mark.parametrize(("size", "number"), [("tiny", 2), ("small", 2), ("small", 4), ("large", 4)])
def test_the_gpt_is_cut_between_its_blocks(size: str, number: int) -> None:
    """Though the model itself may have more members than blocks, of which all blocks together are one."""
    model = build_gpt(SIZES[size], seed=0)
    for i, names in enumerate(cut_into_fragments(model, number)):
        blocks = {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
        assert blocks == set(range(i, SIZES[size].layers, number))


# When the fragments' rounds come.


def equal_at(traces: Sequence[Sequence[Sequence[float]]]) -> list[list[int]]:
    """For every layer, after which steps its weight is the same on all workers."""
    return [
        [
            step
            for step, rows in enumerate(zip(*traces, strict=True), 1)
            if len({row[layer] for row in rows}) == 1
        ]
        for layer in range(len(traces[0][0]))
    ]


@pytest.mark.parametrize(
    ("every", "number", "steps", "rounds"),
    [
        (64, 4, 128, [[64, 128], [16, 80], [32, 96], [48, 112]]),
        (5, 3, 11, [[5, 10], [1, 6, 11], [3, 8]]),  # offsets 0, ⌊5/3⌋, ⌊10/3⌋
        (2, 4, 5, [[2, 4], [2, 4], [1, 3, 5], [1, 3, 5]]),
        (4, 1, 8, [[4, 8]]),
    ],
)
def test_offsets(every: int, number: int, steps: int, rounds: list[list[int]]) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[list[list[float]], list[int]]:
        expression = f"streaming_diloco(every={every}, fragments={number}, delay=0)"
        walk = Walk(comm, expression, layers=number, lr=1 / 64)
        trace = [walk.go() and walk.net.weights for _ in range(steps)]
        return trace, sorted(walk.rounds)

    results = offbeat.simulate(worker, 2)
    assert equal_at([trace for trace, _ in results]) == rounds
    assert results[0][1] == sorted(step for steps in rounds for step in steps)


def test_landing_with_keep() -> None:
    # Slopes 1 and 3, lr 1; two layers, every 4, delay 1, keep 0.5; outer lr 0.5, momentum 0.5, Nesterov.
    # layer 0 begins after 4 and 8:
    #   sent −4, −12: Δ = 8.              step 5: −5, −15       b = 8,  d = 12, a = −6     x = −5.5, −10.5
    #   sent −8.5, −19.5: Δ = −6 + 14.    step 9: −9.5, −22.5   b = 12, d = 14, a = −13    x = −11.25, −17.75
    # layer 1 begins after 2 and 6:
    #   sent −2, −6: Δ = 4.               step 3: −3, −9        b = 4,   d = 6,     a = −3      x = −3, −6
    #   sent −6, −15: Δ = −3 + 10.5.      step 7: −7, −18       b = 9.5, d = 12.25, a = −9.125
    #                                                           x = −8.0625, −13.5625
    expression = "streaming_diloco(every=4, fragments=2, delay=1, keep=0.5, lr=0.5, momentum=0.5, ramp=0)"

    def worker(comm: offbeat.Communicator) -> list[list[float]]:
        walk = Walk(comm, expression, layers=2)
        return [walk.go() and walk.net.weights for _ in range(9)]

    first, second = offbeat.simulate(worker, 2)
    assert [row[0] for row in first] == [-1, -2, -3, -4, -5.5, -6.5, -7.5, -8.5, -11.25]
    assert [row[0] for row in second] == [-3, -6, -9, -12, -10.5, -13.5, -16.5, -19.5, -17.75]
    assert [row[1] for row in first] == [-1, -2, -3, -4, -5, -6, -8.0625, -9.0625, -10.0625]
    assert [row[1] for row in second] == [-3, -6, -6, -9, -12, -15, -13.5625, -16.5625, -19.5625]


def test_without_a_delay_nothing_is_kept() -> None:
    # Δ = 4, a = −0.5·4.
    first, second = walked(
        "streaming_diloco(every=2, fragments=1, delay=0, keep=0.5, lr=0.5, momentum=0.0)", 2
    )
    assert first[1] == second[1] == -2


def test_finish_lands_what_is_in_flight() -> None:
    # After step 4: layer 0 has just sent −4, −12, layer 1 stands at −4, −9 with a = −3 from step 3.
    # Layer 0 lands: b = 8, d = 12, a = −6; x = −5, −9, whose mean is −7. Layer 1: the mean of −4 and −9.
    expression = "streaming_diloco(every=4, fragments=2, delay=1, keep=0.5, lr=0.5, momentum=0.5, ramp=0)"

    def worker(comm: offbeat.Communicator) -> tuple[list[float], list[float]]:
        walk = Walk(comm, expression, layers=2)
        walk.go(4)
        walk.finish()
        return walk.net.weights, [walk.state(i)["anchor"][0].item() for i in range(2)]

    assert offbeat.simulate(worker, 2) == [([-7, -6.5], [-7, -6.5])] * 2


def test_each_fragment_has_its_own_outer_state() -> None:
    def worker(comm: offbeat.Communicator) -> list[tuple[float, float]]:
        expression = "streaming_diloco(every=4, fragments=2, delay=0, lr=0.5, momentum=0.5, ramp=0)"
        walk = Walk(comm, expression, layers=2)
        walk.go(5)
        states = [walk.state(i) for i in range(2)]
        assert [len(state["outer"]["state"]) for state in states] == [1, 1]
        return [
            (state["anchor"][0].item(), state["outer"]["state"][0]["momentum_buffer"].item())
            for state in states
        ]

    # Layer 0 has had one round after four steps: Δ = b = 8, a = −0.5·12. Layer 1 one after two: 4 and −3.
    assert offbeat.simulate(worker, 2) == [[(-6, 8), (-3, 4)]] * 2


class Counting(Slopes):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.register_buffer("seen", torch.zeros(1))


def test_buffers_ride_with_the_first_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slopes.Slopes", Counting)

    def worker(comm: offbeat.Communicator) -> list[float]:
        walk = Walk(comm, "streaming_diloco(every=4, fragments=2, delay=0)", layers=2)
        seen = []
        for _ in range(4):
            walk.net.seen.fill_(comm.rank)
            walk.go()
            seen.append(walk.net.seen.item())
        return seen

    assert offbeat.simulate(worker, 2) == [[0, 0, 0, 0.5], [0, 1, 1, 0.5]]  # at first rank 0's


# Bad input.


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (
            "streaming_diloco(every=4, delay=5)",
            "delay=5 with Every(steps=4): delay must not exceed the period, which can be 4.",
        ),
        ("streaming_diloco(delay=-1)", 'delay=-1: delay must be a number of steps, at least 0, or "round".'),
        ("streaming_diloco(every=0)", "Every(steps=0): steps must be at least 1."),
        (
            "streaming_diloco(momentum=1.0)",
            "SGD(lr=0.7, momentum=1.0, nesterov=True, ramp=40): momentum must be at least 0 and below 1.",
        ),
        (
            "streaming_diloco(keep=1.0)",
            "Outer(optimizer=SGD(lr=0.7, momentum=0.9, nesterov=True, ramp=40), keep=1.0, device=None): "
            "keep must be at least 0 and below 1.",
        ),
    ],
)
def test_bad_numbers(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Walk(offbeat.Solo(), expression, layers=4)
