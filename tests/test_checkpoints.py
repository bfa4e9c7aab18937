"""Checkpoints that do not belong together, or are damaged: every rank says so, in one sentence."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Realistic, data, optimizer_for, snapshot
from table import EACH, SAVE_EVERY, enough
from test_resume import Run
from torch import Tensor, nn

import offbeat
from offbeat.app.runs.folder import CheckpointStore, prepare
from offbeat.app.runs.launch import launch
from offbeat.app.runs.setting import Setting, check

WORKERS, GUILTY = 4, 2
State = dict[str, Any]


def steps_of(expression: str) -> tuple[int, int]:
    """Two steps after which it can be saved."""
    often = SAVE_EVERY.get(expression)
    if "Seconds(" in expression:
        return 5, 9  # in different rounds: within one, numbers of steps may differ
    return (often, 2 * often) if often else (4, 5)


def states(expression: str, *, seed: int = 0, workers: int = WORKERS) -> list[list[State]]:
    """What each rank has saved after either step, in a run of its own."""

    def worker(comm: offbeat.Communicator) -> list[State]:
        torch.manual_seed(comm.rank)
        run, saved, done = Run(comm, expression, "momentum", seed=seed), [], 0
        for step in steps_of(expression):
            run.go(done, step)
            saved.append(torch.load(io.BytesIO(run.save()), weights_only=True))
            done = step
        return saved

    return offbeat.simulate(worker, workers)


def loaded(
    comm: offbeat.Communicator, expression: str, state: State, order: tuple[str, ...] = ("net", "opt", "sync")
) -> tuple[str, str] | None:
    """What a rank raises when it loads its state and makes one step."""
    torch.manual_seed(comm.rank)
    run = Run(comm, expression, "momentum", seed=7)
    try:
        with run.sync:
            for part in order:
                getattr(run, part).load_state_dict(state[part])
            run.go(run.sync.steps, run.sync.steps + 1)
    except offbeat.OffbeatError as error:
        return type(error).__name__, str(error)
    return None


def tensor_in(state: Any) -> tuple[Any, Any] | None:
    """The first tensor that all ranks have in the same shape: what holds it, and under which key."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        if key == "shard":
            continue
        if torch.is_tensor(value) and value.dim():
            return state, key
        if found := tensor_in(value):
            return found
    return None


def contradict(state: State) -> State:
    """The same checkpoint with a tensor cut, or in another round where it has none."""
    first = state["sync"]["parts"][0]
    if "round" in first:  # by the clock, all else belongs to one worker
        first["round"] += 1
    elif found := tensor_in(state["sync"]["parts"]):
        holder, key = found
        holder[key] = holder[key][:-1].clone()
    else:
        first["rhythm"]["round"] += 1
    return state


OTHER_RUN = (
    "CheckpointMismatch",
    "The checkpoints of rank 2 and rank 0 come from different runs: load the files of one run on every rank.",
)
OTHER_WEIGHTS = (
    "CheckpointMismatch",
    "The weights of rank 2 are not those saved with the checkpoint: "
    "load model and synchronizer from the same file on every rank.",
)


@pytest.mark.few(3)
@pytest.mark.parametrize("expression", EACH)
def test_one_rank_has_another_checkpoint(expression: str) -> None:
    workers = max(enough(expression), GUILTY + 1)
    mine, other = (states(expression, seed=seed, workers=workers) for seed in (0, 1))
    first, second = (state["sync"]["place"] for state in mine[GUILTY])  # by the clock: rounds

    def answers(guilty: State, order: tuple[str, ...] = ("net", "opt", "sync")) -> list[Any]:
        def worker(comm: offbeat.Communicator) -> Any:
            state = guilty if comm.rank == GUILTY else mine[comm.rank][0]
            return loaded(comm, expression, state, order)

        return offbeat.simulate(worker, workers)

    right = mine[GUILTY][0]
    assert answers(right) == [None] * workers
    assert answers(right, ("sync", "net", "opt")) == [None] * workers
    assert answers(other[GUILTY][0]) == [OTHER_RUN] * workers
    steps = f"Checkpoints disagree: rank 0 loads step {first}, rank 2 step {second}."
    assert answers(mine[GUILTY][1]) == [("Disagreement", steps)] * workers
    # Not those of the next step: CoDA makes none when a stage begins.
    changed = {name: x + 1 if x.is_floating_point() else x for name, x in right["net"].items()}
    replaced = right | {"net": changed}
    assert answers(replaced) == [OTHER_WEIGHTS] * workers
    assert answers(replaced, ("sync", "net", "opt")) == [OTHER_WEIGHTS] * workers
    method = right["sync"]["method"]
    strange = right | {"sync": right["sync"] | {"method": "local_sgd(every=77)"}}
    told = [("CheckpointMismatch", "Rank 2 cannot load its checkpoint: see its error.")] * workers
    told[GUILTY] = (
        "CheckpointMismatch",
        f"The checkpoint has method local_sgd(every=77), this run has {method}.",
    )
    assert answers(strange) == told
    sentence = (
        f"Rank 2's checkpoint of step {first} contradicts rank 0's: their rounds or the shapes of their "
        "tensors differ. Load an earlier checkpoint."
    )
    assert answers(contradict(right)) == [("CheckpointMismatch", sentence)] * workers


def load_here(comm: offbeat.Communicator, expression: str, saved: list[bytes], order: Any) -> Any:
    return loaded(comm, expression, torch.load(io.BytesIO(saved[comm.rank]), weights_only=True), order)


def in_bytes(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "expression",
    [
        "local_sgd(every=3, delay=2)",
        pytest.param("wagma(group_size=2, every=3, grace=60.0)", marks=pytest.mark.slow),
        pytest.param(
            "ssd_sgd(every=3, warmup=0, beta=0.25, in_flight=1, server=SGD(lr=1.0, momentum=0.5))",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_workers_refuse_them_too(pool: Pool, expression: str) -> None:
    mine, other = states(expression), states(expression, seed=1)
    usual = [in_bytes(rank[0]) for rank in mine]

    def answers(guilty: State, *order: str) -> Any:
        saved = [*usual[:GUILTY], in_bytes(guilty), *usual[GUILTY + 1 :]]
        return pool.run(load_here, expression, saved, order or ("net", "opt", "sync"), fresh=True)

    right = mine[GUILTY][0]
    replaced = right | {"net": other[GUILTY][0]["net"]}
    assert answers(right, "sync", "opt", "net") == [None] * WORKERS
    assert answers(other[GUILTY][0]) == [OTHER_RUN] * WORKERS
    assert answers(replaced) == [OTHER_WEIGHTS] * WORKERS
    assert answers(replaced, "sync", "net") == [OTHER_WEIGHTS] * WORKERS
    contradicted = answers(contradict(right))
    assert contradicted == [contradicted[0]] * WORKERS
    assert "Rank 2's checkpoint of step" in contradicted[0][1]


def test_the_odd_one_is_named_also_if_it_is_rank_0() -> None:
    expression = "local_sgd(every=3)"
    mine, other = states(expression), states(expression, seed=1)

    def worker(comm: offbeat.Communicator) -> Any:
        return loaded(comm, expression, (other if comm.rank == 0 else mine)[comm.rank][0])

    for answer in offbeat.simulate(worker, WORKERS):
        assert answer[1].startswith("The checkpoints of rank 0 and rank 1 come from different runs")


def test_two_runs_that_begin_alike_are_told_apart(pool: Pool) -> None:
    first, second = (pool.run(begun, workers=2, fresh=True) for _ in range(2))
    assert first[0] == first[1] != second[0] == second[1]


def begun(comm: offbeat.Communicator) -> int:
    run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
    run.go(0, 1)
    number: int = run.sync.state_dict()["run"]
    return number


def test_a_run_keeps_its_number_when_it_is_resumed() -> None:
    saved = states("local_sgd(every=3)")

    def worker(comm: offbeat.Communicator) -> int:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=7)
        run.net.load_state_dict(saved[comm.rank][0]["net"])
        run.sync.load_state_dict(saved[comm.rank][0]["sync"])
        number: int = run.sync.state_dict()["run"]
        return number

    assert offbeat.simulate(worker, WORKERS) == [rank[1]["sync"]["run"] for rank in saved]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_weights_of_any_kind_have_a_checksum(dtype: torch.dtype) -> None:
    def number(value: float) -> int:
        net = nn.ParameterList([torch.full((3, 2), value, dtype=dtype).t(), torch.tensor(value, dtype=dtype)])
        sync = offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=0.1), group=offbeat.Solo())
        sync.step()
        weights: int = sync.state_dict()["weights"]
        return weights

    assert number(1.0) == number(1.0) != number(1.0078125)


def flip(path: Path, wanted: Tensor) -> None:
    """One bit of one value of a tensor in a file."""
    whole = bytearray(path.read_bytes())
    at = bytes(whole).index(wanted.numpy().tobytes())
    whole[at + 5] ^= 4
    path.write_bytes(whole)


@pytest.mark.slow
def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path) -> None:
    """Wherever it is: in a tensor, in the names, or in the directory of the file."""
    store, state = CheckpointStore(tmp_path, rank=0, workers=1), {"x": torch.arange(3.0), "n": 5}
    store.save(3, state)
    path = tmp_path / "step-000000003/rank-0.pt"
    whole, refused = path.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            loaded = store.load(3)
        except offbeat.CheckpointMismatch:
            refused += 1
        else:
            assert loaded["n"] == 5, bit
            assert torch.equal(loaded["x"], state["x"]), bit
    assert refused > 100


def test_groups_of_different_sizes_are_no_contradiction() -> None:
    """A worker alone in its group sends nothing, so its code remembers nothing."""

    def worker(comm: offbeat.Communicator) -> None:
        state: dict[str, Any] = {}
        weights: dict[str, Tensor] = {}
        for resumed in (False, True):
            net = Realistic(comm.rank)
            opt = optimizer_for(net)
            exchange = offbeat.Exchange(
                offbeat.params(net),
                when=offbeat.Every(2),
                among=offbeat.Subgroups([[0], [1, 2]], comm),
                reduce=offbeat.LowRank(1, least=1),
                update=offbeat.Outer(offbeat.SGD(lr=1.0)),
            )
            sync = offbeat.Synchronizer(opt, [exchange])
            if resumed:
                net.load_state_dict(weights)
                sync.load_state_dict(state)
            for step in range(3):
                net(data(comm.rank, step)).backward()
                sync.step()
                opt.zero_grad()
            state, weights = sync.state_dict(), snapshot(net)

    offbeat.simulate(worker, 3)


def test_a_flipped_bit_and_other_damage_are_found(tmp_path: Path) -> None:
    shelf, state = (
        CheckpointStore(tmp_path, rank=0, workers=1),
        {"x": torch.randn(5), "y": {"z": torch.randn(1000)}},
    )
    path = tmp_path / "step-000000003/rank-0.pt"
    for tensor in (state["x"], state["y"]["z"]):
        shelf.save(3, state)
        assert torch.equal(shelf.load(3)["x"], state["x"])
        flip(path, tensor)
        with pytest.raises(offbeat.CheckpointMismatch, match=r"Rank 0's checkpoint '.*rank-0.pt' is damaged"):
            shelf.load(3)
    shelf.save(3, state)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(offbeat.CheckpointMismatch, match="is damaged"):
            shelf.load(3)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'touch marker'\ntR.")
    with pytest.raises(offbeat.CheckpointMismatch, match="is damaged"):
        shelf.load(3)


@pytest.mark.parametrize("damage", ["bit", "run"])
def test_a_run_is_not_resumed_from_a_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    setting = Setting(
        method="local_sgd(every=4, delay=2)", where="simulation", task="digits", model="tiny", workers=2,
        steps=6, evaluations=1, checkpoint_every=5,
    )  # fmt: skip
    task = setting.find_task()
    check(setting, task)
    for name in ("one", "two"):
        full = setting.fill(task)
        prepare(tmp_path / name, full, task)
        assert launch([tmp_path / name])
    path = tmp_path / "one/checkpoints/step-000000006/rank-1.pt"  # of the end
    state = torch.load(path, weights_only=True)
    if damage == "bit":
        flip(path, next(iter(state["model"].values())))
        sentence = r"^Rank 1's checkpoint '.*rank-1.pt' is damaged \(wrong checksum of .*\): delete"
    else:
        state["sync"]["run"] += 1
        torch.save(state, path)
        sentence = "^The checkpoints of rank 1 and rank 0 come from different runs"
    with pytest.raises(offbeat.CheckpointMismatch, match=sentence):
        launch([tmp_path / "one"], resume=True)
    assert launch([tmp_path / "two"], resume=True)
