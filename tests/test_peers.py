"""Which groups are accepted, and which ranks are in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Pool
from problems import Dyadic, data, optimizer_for
from sentences import says
from torch.distributed.device_mesh import init_device_mesh

import offbeat
from offbeat import Communicator, Solo, Subgroups, World
from offbeat.among import communicator


def test_without_any_group_it_is_a_world_of_one() -> None:
    assert isinstance(communicator(), Solo)
    assert isinstance(World().everyone, Solo)


def test_a_communicator_is_taken_as_it_is() -> None:
    solo = Solo()
    assert communicator(solo) is solo
    assert World(solo).at(7) is World(solo).everyone is solo


@pytest.mark.parametrize("group", ["gloo", 4, [0, 1]])
def test_anything_else_is_refused(group: Any) -> None:
    sentence = f"group={group!r}: group must be a ProcessGroup, a one-axis DeviceMesh or a Communicator."
    with says(TypeError, sentence):
        communicator(group)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [[0], [1], [2], [3]]),
        (2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, [[0, 1, 2, 3]] * 4),
        (((0, 3), (1,), (2,)), [[0, 3], [1], [2], [0, 3]]),
        ([[3, 0], [2, 1]], [[3, 0], [2, 1], [2, 1], [3, 0]]),
    ],
)
def test_subgroups(ranks: Any, expected: list[list[int]]) -> None:
    def worker(comm: Communicator) -> list[int]:
        peers = Subgroups(ranks, comm)
        assert peers.everyone is comm
        assert peers.at(0) is peers.at(1)
        return [word[0] for word in peers.at(0).tell([comm.rank]).wait()]

    assert offbeat.simulate(worker, 4) == expected


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            3,
            "Subgroups(3): 4 workers do not divide into groups of 3; "
            "for uneven groups, list the ranks of each.",
        ),
        (
            0,
            "Subgroups(0): 4 workers do not divide into groups of 0; "
            "for uneven groups, list the ranks of each.",
        ),
        (((0, 1), (2,)), "Subgroups(((0, 1), (2,))): each of the ranks 0 to 3 must be in exactly one group."),
        (
            ((0, 1), (1, 2, 3)),
            "Subgroups(((0, 1), (1, 2, 3))): each of the ranks 0 to 3 must be in exactly one group.",
        ),
        (
            ((0, 1, 2, 4),),
            "Subgroups(((0, 1, 2, 4),)): each of the ranks 0 to 3 must be in exactly one group.",
        ),
    ],
)
def test_subgroups_that_do_not_cover_all(ranks: Any, sentence: str) -> None:
    with says(ValueError, sentence):
        offbeat.simulate(lambda comm: Subgroups(ranks, comm), 4)


def meshes(comm: Communicator) -> list[Any]:
    """On real processes: a group, a mesh of one axis, an axis of a mesh, and a mesh of two axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    axis = communicator(mesh["replica"])
    mean = axis.mean([torch.tensor([float(dist.get_rank())])]).wait()[0].item()
    again = communicator(mesh["replica"]) is axis
    world = communicator()
    same = world is communicator(dist.group.WORLD)
    try:
        communicator(mesh)
        sentence = "accepted"
    except ValueError as error:
        sentence = str(error)
    return [axis.size, mean, again, world.size, same, sentence.partition(": the mesh")[2]]


@pytest.mark.slow
def test_process_groups_and_meshes(pool: Pool) -> None:
    expected = " must have one axis, not 2: pass mesh['replica']."
    # Ranks 0 and 2 hold the first shard, 1 and 3 the second.
    assert pool.run(meshes) == [[2, mean, True, 4, True, expected] for mean in (1.0, 2.0, 1.0, 2.0)]


def lost(comm: Communicator) -> str:
    """Rank 3 fails while rank 2, alone with it in a node, waits for it."""
    model = Dyadic()
    optimizer = optimizer_for(model)
    sync = offbeat.hierarchical(model, optimizer, nodes=2, inner=1, outer=4, group=comm)
    try:
        with sync:
            for step in range(8):
                if comm.rank == 3 and step == 2:
                    raise ZeroDivisionError("no data")
                model(data(comm.rank, step)).backward()
                sync.step()
                optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("the gather of int64[8]", "all ranks to report")
    return "finished"


@pytest.mark.parametrize("kind", ["Virtual", "Torch"])
def test_a_worker_lost_in_a_group_has_its_global_rank_in_the_error(pool: Pool, kind: str) -> None:
    said = offbeat.simulate(lost, 4) if kind == "Virtual" else pool.run(lost, fresh=True)
    assert said[3] == "ZeroDivisionError: no data"
    waiting = "Round 2 (step 3): Waiting for all ranks to report"
    assert said[2] == f"PeerLost: {waiting}: rank 3 failed (ZeroDivisionError: no data)."
    assert all(sentence.startswith("PeerLost: Round ") for sentence in said[:2])


def butterfly(workers: int, size: int | None, rounds: int, seed: int = 0) -> list[list[list[int]]]:
    """The groups of each round on rank 0, equal on all ranks."""

    def worker(comm: offbeat.Communicator) -> list[list[list[int]]]:
        peers = offbeat.Butterfly(size, comm, seed)
        for t in range(rounds):
            mine = next(group for group in peers.groups(t) if comm.rank in group)
            assert peers.at(t).size == len(mine)
            assert peers.groups(t) == peers.groups(t + peers.cycle)
        return [peers.groups(t) for t in range(rounds)]

    seen = offbeat.simulate(worker, workers)
    assert all(groups == seen[0] for groups in seen)
    return seen[0]


def test_a_butterfly_of_powers_of_two() -> None:
    # Bits 0 and 1, then 2 and 0, then 1 and 2.
    assert butterfly(8, 4, 3) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ]
    assert butterfly(4, None, 3) == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 6, 7, 8, 9, 12])
@pytest.mark.parametrize("size", [None, 1, 2, 3, 4, 99])
def test_a_butterfly_of_any_number(workers: int, size: int | None) -> None:
    default = {1: 1, 2: 2, 3: 2, 5: 4, 6: 4, 7: 4, 8: 4, 9: 4, 12: 4}[workers]
    wanted = min(workers, default if size is None else size)
    for groups in butterfly(workers, size, 4):
        assert sorted(rank for group in groups for rank in group) == list(range(workers))
        assert len(groups) == -(-workers // wanted)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_a_random_butterfly_mixes_all_workers_and_depends_on_the_seed() -> None:
    rounds = butterfly(5, 2, 16)
    met = {(p, q) for groups in rounds for group in groups for p in group for q in group}
    assert len(met) == 25
    assert rounds != butterfly(5, 2, 16, seed=1)
