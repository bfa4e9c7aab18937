"""Parameters that lie one after the other are averaged where they lie, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from conftest import Pool
from problems import Realistic, data, same, snapshot
from sentences import says
from torch import Tensor, nn

import offbeat
from offbeat.base.packed import Packed

METHODS = [
    "local_sgd(every=2, drift=False)",
    "local_sgd(every=2, drift=False, moments='average', buffers='keep')",
    "local_sgd(every=2)",
    "post_local_sgd(switch=3, every=2, drift=False)",
    "hierarchical(nodes=2, inner=1, outer=2, drift=False)",
    "diloco(every=2)",
]


class Mixed(Realistic):
    """Beside BatchNorm: a second dtype, an empty, a tied and a frozen parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.double_precision = nn.Parameter(torch.full((3, 2), 1.0 + seed, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.tied = self.body[4].weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, data: Tensor) -> Tensor:
        return super().forward(data) + (self.double_precision.square().sum() + self.tied.sum()).float()


def trained(comm: offbeat.Communicator, expression: str, flat: bool) -> tuple[dict[str, Tensor], bool]:
    """The weights in the end, and whether they were sent from where they lie."""
    torch.manual_seed(comm.rank)
    net = Mixed(comm.rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    if flat:
        offbeat.flatten(net)
    sync = offbeat.method(expression)(net, optimizer, group=comm)
    for step in range(7):
        if step == 4 and flat:
            net.double_precision.data = net.double_precision.data.clone()  # moved away: copied from now on
        net(data(comm.rank, step)).backward()
        sync.step()
        optimizer.zero_grad()
    part = sync.parts[-1]
    assert isinstance(part, offbeat.Exchange)
    memories = {flat.untyped_storage().data_ptr() for flat in part.payload.packed.flats}
    sync.finish()
    return snapshot(net), net.body[0].weight.untyped_storage().data_ptr() in memories


@pytest.mark.parametrize("expression", METHODS)
def test_a_payload_in_pieces_arrives_as_in_one(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of growing length in each dtype; buffers lie behind the parameters."""
    whole, lengths = offbeat.simulate(lambda comm: trained(comm, expression, False), 4), []
    monkeypatch.setattr("offbeat.reduce.rounded._HEAD", 8)
    monkeypatch.setattr("offbeat.reduce.rounded._GROWTH", 2)
    pieces = Packed.pieces

    def counted(self: Packed, size: int, growth: int) -> list[tuple[Tensor, list[int]]]:
        found = list(pieces(self, size, growth))
        lengths.append([len(piece) for piece, _ in found])
        return found

    monkeypatch.setattr(Packed, "pieces", counted)
    for (a, _), (b, _) in zip(
        whole, offbeat.simulate(lambda comm: trained(comm, expression, False), 4), strict=True
    ):
        assert same(a, b)
    assert all(len(found) > 3 for found in lengths)
    assert bool(lengths) == (not expression.startswith("diloco"))


@pytest.mark.parametrize("expression", METHODS)
def test_flat_parameters_train_as_others_do(expression: str) -> None:
    plain = offbeat.simulate(lambda comm: trained(comm, expression, False), 4)
    flat = offbeat.simulate(lambda comm: trained(comm, expression, True), 4)
    assert all(same(a, b) for (a, _), (b, _) in zip(plain, flat, strict=True))
    assert not any(there for _, there in plain)
    assert all(there is ("drift=False" in expression) for _, there in flat)


def test_over_gloo_too(pool: Pool) -> None:
    plain, flat = (pool.run(trained, METHODS[0], choice) for choice in (False, True))
    for (a, _), (b, there) in zip(plain, flat, strict=True):
        torch.testing.assert_close(a, b)  # gloo sums each vector in an order of its own
        assert there


def test_the_parameters_stay_the_same_objects_with_the_same_values() -> None:
    net = Mixed()
    before, values = list(net.parameters()), snapshot(net)
    assert offbeat.flatten(net) is net
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert same(values, snapshot(net))
    assert net.tied is net.body[4].weight
    assert net.frozen.untyped_storage().nbytes() == 8
    memories = {p.untyped_storage().data_ptr() for p in net.parameters() if p.requires_grad and p.numel()}
    assert len(memories) == 2  # one per dtype


def test_what_cannot_be_moved_is_named() -> None:
    net = nn.Linear(3, 2)
    net.weight = nn.Parameter(torch.zeros(3, 2).t())
    with says(
        ValueError,
        "flatten(model): 'weight' is not contiguous; only whole, contiguous parameters can be moved.",
    ):
        offbeat.flatten(net)
