"""A checkpoint of some workers is continued by another number of workers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, Realistic, optimizer_for, same, snapshot, take_step
from table import METHODS, ROWS, enough, savable
from test_fsdp import build, mesh_of_four, weights
from test_fsdp import loop as train
from test_transfer import SHARED, reason_of
from ticking import clocked
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.engine.agreement import copy_state

Checkpoint = list[dict[str, Any]]  # one state per rank
SIZES = [(2, 3), (3, 2), (4, 1), (1, 2)]
AT = (3, 5)  # right after a round or with messages in flight, and in between
FEW = [row for row in ROWS if row.values[0] in SHARED]  # the slow rows are marked
# Each row with one pair of sizes, and what differs most with all.
CASES = [pytest.param(*SIZES[i % 4], *row.values, marks=row.marks) for i, row in enumerate(FEW)]
CASES += [
    pytest.param(*sizes, row)
    for row in (
        "local_sgd(every=3, delay=2)",
        "diloco(every=3)",
        "ddp(reduce=ErrorFeedback(TopK(3, least=1)))",
    )
    for sizes in SIZES
]


class Loop:
    """A training loop, with what a user saves."""

    def __init__(
        self,
        comm: offbeat.Communicator,
        row: str,
        optimizer: str = "momentum",
        kind: type[nn.Module] = Realistic,
    ) -> None:
        torch.manual_seed(comm.rank)
        self.comm, self.net = comm, kind(comm.rank)
        self.opt = optimizer_for(self.net, optimizer)
        self.sync = offbeat.method(row)(self.net, self.opt, group=clocked(comm, row))

    def go(self, first: int, last: int) -> list[dict[str, Tensor]]:
        trace = []
        for step in range(first, last):
            take_step(self.net, self.opt, self.sync, self.comm.rank, step)
            trace.append(snapshot(self.net))
        return trace

    def save(self) -> dict[str, Any]:
        return copy_state({k: getattr(self, k).state_dict() for k in ("net", "opt", "sync")})

    def load(self, state: dict[str, Any], *, resize: bool = True) -> None:
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(copy_state(state["opt"]))
        self.sync.load_state_dict(state["sync"], resize=resize)


@cache
def checkpoints(row: str, workers: int, kind: type[nn.Module] = Realistic) -> dict[int, Checkpoint]:
    """What all ranks have saved, by step."""

    def worker(comm: offbeat.Communicator) -> dict[int, dict[str, Any]]:
        loop, saved = Loop(comm, row, kind=kind), {}
        for step in range(max(AT)):
            loop.go(step, step + 1)
            if savable(row, step + 1):
                saved[step + 1] = loop.save()
        return saved

    ranks = offbeat.simulate(worker, workers)
    return {step: [saved[step] for saved in ranks] for step in ranks[0]}


def resumed(
    row: str,
    files: Checkpoint,
    workers: int,
    do: Callable[[Loop], Any],
    *,
    kind: type[nn.Module] = Realistic,
    take: Callable[[int], int] | None = None,
) -> list[Any]:
    """What `do` returns on each of the workers, which continue from the files."""

    def worker(comm: offbeat.Communicator) -> Any:
        loop = Loop(comm, row, kind=kind)
        loop.load(files[comm.rank % len(files) if take is None else take(comm.rank)])
        return do(loop)

    return offbeat.simulate(worker, workers)


def floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def start_and_go_on(loop: Loop) -> Any:
    loop.sync.start()
    start = snapshot(loop.net)
    parts = [part.state_dict() for part in loop.sync.parts]
    trace = loop.go(loop.sync.steps, loop.sync.steps + 6)
    loop.sync.finish()
    return start, parts, [*trace, snapshot(loop.net)]


@pytest.mark.few(8)
@pytest.mark.parametrize(("old", "new", "row"), CASES)
def test_another_number_of_workers_goes_on(old: int, new: int, row: str) -> None:
    """All start equal, from what `averaged()` would have shown, and end equal."""
    for step, files in checkpoints(row, old).items():
        if step not in AT:
            continue
        workers = resumed(row, files, new, start_and_go_on)
        starts = [start for start, _, _ in workers]
        assert all(same(starts[0], start) for start in starts)
        ends = [floats(trace[-1]) for _, _, trace in workers]
        assert all(same(ends[0], end) for end in ends)
        assert all(tensor.isfinite().all() for tensor in ends[0].values())
        if new >= old and not row.startswith("def_sgd"):  # its residuals count in averaged()
            shown = consensus(row, files)
            for name, tensor in floats(starts[0]).items():
                torch.testing.assert_close(tensor, shown[name], rtol=1e-6, atol=1e-6)


def consensus(row: str, files: Checkpoint) -> dict[str, Tensor]:
    """What `averaged()` shows to as many workers as have saved it."""

    def worker(comm: offbeat.Communicator) -> dict[str, Tensor]:
        loop = Loop(comm, row)
        loop.load(files[comm.rank], resize=False)
        with loop.sync.averaged():
            return snapshot(loop.net)

    return offbeat.simulate(worker, len(files))[0]


def is_whole(value: Any) -> bool:
    """Whether a state holds no residual."""
    if isinstance(value, dict):
        return all(item is None if key == "residual" else is_whole(item) for key, item in value.items())
    return all(map(is_whole, value)) if isinstance(value, list) else True


def equal_steps(row: str) -> list[int]:
    """Steps after which nothing belongs to one worker: weights are equal and codes have sent everything."""
    saved = checkpoints(row, 2)
    return [
        step
        for step, (one, other) in saved.items()
        if one["sync"]["weights"] == other["sync"]["weights"] and is_whole(one["sync"]["parts"])
    ]


EQUAL = {
    "ddp()": [1, 2, 3, 4, 5],
    "ddp(delay=1)": [1, 2, 3, 4, 5],  # with a gradient in flight
    "local_sgd(every=3)": [3],
    "post_local_sgd(switch=4, every=3)": [1, 2, 3, 4],
    "qsr(alpha=0.5, base=2, warmup=2, total=10)": [2],
    "slowmo(every=3, lr=1.0, momentum=0.625, ramp=1)": [3],
    "diloco(every=3, lr=0.5, momentum=0.625, ramp=1)": [3],
    "palsgd(every=4, p=0.5, eta=0.5, lr=0.5, momentum=0.5, ramp=0, warmup=3)": [1, 2, 3, 4],
    "lookahead_diloco(every=4, inner=2, alpha=0.5, lr=0.5, momentum=0.625, ramp=1)": [4],
    "local_sgd(every=3, reduce=Mean('bfloat16', least=1))": [3],
    "diloco(every=3, lr=0.5, momentum=0.625, ramp=1, reduce=Quantized(4, block=8, least=1))": [3],
}


@pytest.mark.few(4)
@pytest.mark.parametrize("row", EQUAL)
def test_as_many_workers_continue_to_the_bit(row: str) -> None:
    """Where all is equal, any worker's state serves every other."""
    assert equal_steps(row) == EQUAL[row]
    for step in EQUAL[row]:
        files = checkpoints(row, 2)[step]

        def worker(comm: offbeat.Communicator, swap: int, files: Checkpoint = files, step: int = step) -> Any:
            loop = Loop(comm, row)
            torch.manual_seed(7 + comm.rank)
            mine = files[comm.rank]
            loop.load({**mine, "sync": files[(comm.rank + swap) % 2]["sync"]})
            assert (loop.sync._loaded.ranks is not None) == bool(swap)
            trace = loop.go(step, step + 6)
            loop.sync.finish()
            return [*trace, snapshot(loop.net)], sorted((r.step, r.round) for r in loop.sync.reports)

        plain, swapped = (offbeat.simulate(lambda comm, s=s: worker(comm, s), 2) for s in (0, 1))
        for (one, reports), (other, others) in zip(plain, swapped, strict=True):
            for a, b in zip(one, other, strict=True):
                parameters = [name for name in a if "running" not in name and "tracked" not in name]
                assert all(torch.equal(a[name], b[name]) for name in parameters)
            assert reports == others


# By hand. Worker r of the old and the new moves by 1 + 2r in each step, from 0. Two old workers are saved
# after `at` steps. Then: the weights of three new ones at their start, and after each of the next steps.
BY_HAND = {
    # 2 and 6 count once each, though two workers have the first file. Then 6, 10, 14: the mean is 10.
    ("local_sgd(every=4)", 2): ([4, 4, 4], [[5, 7, 9], [10, 10, 10]]),
    # v = -4 and a = 4 after step 2. Step 3 is forgotten. v = -2 + (4 - 7) = -5, a = 9.
    ("slowmo(every=2, lr=1.0, momentum=0.5, ramp=0)", 3): ([4, 4, 4], [[9, 9, 9]]),
    # a = 0 + 0.5·4. Then mean(a - x) = -3 and a = 3.5.
    ("diloco(every=2, lr=0.5, momentum=0.0)", 3): ([2, 2, 2], [[3.5, 3.5, 3.5]]),
    # 4 is in flight, and is what the new workers have sent: it shifts nobody.
    ("cocod(every=2, delay=1)", 2): ([4, 4, 4], [[5, 7, 9], [6, 10, 14]]),
    ("cocod(every=2, delay=1, reduce=RandomBlock(1, least=1))", 2): ([4, 4, 4], [[5, 7, 9], [6, 10, 14]]),
    # 4 is in flight, and lands half.
    ("dasgd(every=2, delay=1, keep=0.5)", 2): ([4, 4, 4], [[4.5, 5.5, 6.5]]),
    # A displacement of -4 is in flight: a = 2 when it lands, and x = x/2 + 1.
    ("streaming_diloco(every=2, fragments=1, delay=1, keep=0.5, lr=0.5, momentum=0.0, reduce=Mean())", 2): (
        [0, 0, 0],
        [[1.5, 2.5, 3.5]],
    ),
    # A gradient of -2 is in flight, the next is -3.
    ("ddp(delay=1)", 1): ([0, 0, 0], [[2, 2, 2], [5, 5, 5]]),
    # The slow weights follow to the anchor 0. After 2, 6, 10 they are 1, 3, 5, and the anchor half of 3.
    ("lookahead_diloco(every=4, inner=2, alpha=0.5, lr=0.5, momentum=0.0)", 2): (
        [0, 0, 0],
        [[1, 3, 5], [1.5, 1.5, 1.5]],
    ),
}  # fmt: skip


class Moving:
    """A worker whose one weight moves by 1 + 2·rank in each step."""

    def __init__(self, comm: offbeat.Communicator, row: str) -> None:
        self.net, self.rank = nn.Linear(1, 1, bias=False), comm.rank
        nn.init.zeros_(self.net.weight)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.sync = offbeat.method(row)(self.net, self.opt, group=comm)

    def step(self) -> float:
        self.net.weight.grad = torch.full((1, 1), -1.0 - 2 * self.rank)
        self.sync.step()
        return self.net.weight.item()


@pytest.mark.parametrize(("row", "at"), BY_HAND)
def test_the_first_steps_by_hand(row: str, at: int) -> None:
    start, steps = BY_HAND[row, at]

    def before(comm: offbeat.Communicator) -> Any:
        moving = Moving(comm, row)
        for _ in range(at):
            moving.step()
        return copy_state([moving.net.state_dict(), moving.sync.state_dict()])

    def after(comm: offbeat.Communicator) -> Any:
        moving = Moving(comm, row)
        weights, state = files[comm.rank % 2]
        moving.net.load_state_dict(weights)
        moving.sync.load_state_dict(state, resize=True)
        moving.sync.start()
        return [moving.net.weight.item(), *[moving.step() for _ in steps]]

    files = offbeat.simulate(before, 2)
    assert [list(row) for row in zip(*offbeat.simulate(after, 3), strict=True)] == [start, *steps]


ROW = "local_sgd(every=3, reduce=ErrorFeedback(TopK(3, least=1)))"


def test_it_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for row, line in (
        (ROW, "its weights are the mean of 3 workers; dropped: what codes have not sent yet."),
        ("diloco(every=3)", "its weights are the anchor."),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "offbeat"):
            resumed(row, checkpoints(row, 3)[4], 4, lambda loop: loop.go(4, 5))
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert said[0].startswith(row.partition("(")[0])
        assert said[0].endswith(f") continues a checkpoint of 3 workers with 4, after step 4: {line}")


def test_buffers_of_whole_numbers_follow_rank_0() -> None:
    files = checkpoints("local_sgd(every=3)", 2, Dyadic)[5]
    counts = [int(file["net"]["count"]) for file in files]
    assert counts[0] != counts[1]

    def start(loop: Loop) -> int:
        loop.sync.start()
        return int(loop.net.count)

    assert resumed("local_sgd(every=3)", files, 3, start, kind=Dyadic) == [counts[0]] * 3


def test_the_weights_may_be_loaded_last() -> None:
    """And are checked: those of another file are refused, on all ranks."""
    files = checkpoints("local_sgd(every=3)", 2)[4]

    def worker(comm: offbeat.Communicator, whose: int) -> Any:
        loop = Loop(comm, "local_sgd(every=3)")
        loop.sync.load_state_dict(files[comm.rank % 2]["sync"], resize=True)
        loop.net.load_state_dict(files[(comm.rank + whose) % 2]["net"])
        state = loop.sync.state_dict()  # of the consensus, not of one file
        return snapshot(loop.net), state["weights"], state["workers"]

    (one, weights, workers), *others = offbeat.simulate(lambda comm: worker(comm, 0), 3)
    assert all(same(one, other) and weights == sums for other, sums, _ in others)
    assert workers == 3
    assert same(one, resumed("local_sgd(every=3)", files, 3, lambda loop: start_and_go_on(loop)[0])[0])
    with pytest.raises(offbeat.CheckpointMismatch, match="The weights of rank 0, 1, 2 are not those saved"):
        offbeat.simulate(lambda comm: worker(comm, 1), 3)


@pytest.mark.parametrize("row", [row for row in METHODS if reason_of(row) is not None])
def test_methods_that_cannot_say_so(row: str) -> None:
    """On every rank, before anything is sent. With as many workers, they resume as ever."""
    workers = enough(row)

    def worker(comm: offbeat.Communicator) -> tuple[str, str]:
        loop = Loop(comm, row)
        state = loop.sync.state_dict()
        loop.sync.load_state_dict(state, resize=True)
        before = loop.sync.totals.bytes_sent
        with pytest.raises(offbeat.CheckpointMismatch) as error:
            loop.sync.load_state_dict({**state, "workers": 8}, resize=True)
        assert loop.sync.totals.bytes_sent == before
        return str(error.value), repr(loop.sync)

    for said, method in offbeat.simulate(worker, workers):
        assert said == (
            f"load_state_dict(resize=True): {method} cannot continue a checkpoint of 8 workers with "
            f"{workers}, because {reason_of(row)}: start 8 workers, or a new run from exported weights."
        )


def test_files_of_one_checkpoint() -> None:
    files, later = (checkpoints("local_sgd(every=3)", 2)[step] for step in (3, 4))
    other = checkpoints("local_sgd(every=4)", 2)[3]
    mixed = [files[0], later[1], files[0]]
    with pytest.raises(offbeat.Disagreement, match="rank 0 loads step 3, rank 1 step 4"):
        resumed("local_sgd(every=3)", mixed, 3, start_and_go_on)
    with pytest.raises(offbeat.CheckpointMismatch, match=r"has method local_sgd|Rank 1 cannot load"):
        resumed("local_sgd(every=3)", [files[0], other[1], files[0]], 3, start_and_go_on)
    three = checkpoints("local_sgd(every=3)", 3)[3]
    changed = {**three[1], "sync": {**three[1]["sync"], "run": files[0]["sync"]["run"]}}
    with pytest.raises(offbeat.CheckpointMismatch, match="contradicts"):
        resumed("local_sgd(every=3)", [files[0], changed], 2, start_and_go_on)


# Checkpoints in folders


def save(folder: Path, row: str, workers: int, at: int, *, alone: bool = False) -> list[dict[str, Tensor]]:
    """Save after `at` steps, in one folder or in one for each rank. Return every rank's weights."""

    def worker(comm: offbeat.Communicator) -> dict[str, Tensor]:
        loop = Loop(comm, row)
        loop.go(0, at)
        loop.sync.save(place(folder, comm.rank, alone=alone))
        return {**snapshot(loop.net), "momentum": momentum_of(loop)}

    return offbeat.simulate(worker, workers)


def momentum_of(loop: Loop) -> Tensor:
    return loop.opt.state[loop.net.wide[0]]["momentum_buffer"].clone()


def place(folder: Path, rank: int, *, alone: bool) -> Path:
    return folder / str(rank) if alone else folder


def load(
    folder: Path, row: str, workers: int, do: Callable[[Loop], Any] = lambda loop: snapshot(loop.net), *,
    alone: bool = False, resize: bool = True,
) -> list[Any]:  # fmt: skip
    """What `do` returns on each of the workers after loading; the sentence of an error."""

    def worker(comm: offbeat.Communicator) -> Any:
        loop = Loop(comm, row)
        try:
            if not loop.sync.load(place(folder, comm.rank, alone=alone), resize=resize):
                return None
        except offbeat.OffbeatError as error:
            return str(error)
        return do(loop)

    return offbeat.simulate(worker, workers)


def mean_of(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = floats(weights[0]).keys() - {"momentum"}
    return {name: torch.stack([w[name] for w in weights]).double().mean(0) for name in names}


@pytest.mark.parametrize(("old", "new"), [*SIZES, (2, 5), (5, 2)])
def test_a_shared_folder(old: int, new: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights of all old workers count once, and each new one takes over the optimizer of an old one."""
    before = save(tmp_path, "local_sgd(every=3)", old, 4)

    def do(loop: Loop) -> dict[str, Tensor]:
        assert torch.equal(momentum_of(loop), before[loop.comm.rank % old]["momentum"])
        weights = snapshot(loop.net)
        loop.go(4, 7)
        loop.sync.save(tmp_path)
        return weights

    after = load(tmp_path, "local_sgd(every=3)", new, do)
    assert all(same(after[0], other) for other in after)
    for name, mean in mean_of(before).items():
        torch.testing.assert_close(after[0][name].double(), mean, rtol=1e-6, atol=1e-6)
    assert caplog.messages[-1].endswith(f"its weights are the mean of {old} worker{'s' * (old > 1)}.")
    # The files of the old workers are of no use any more.
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"offbeat-step-7-rank-{rank}-of-{new}.pt" for rank in range(new)}


def test_random_states_stay_apart(tmp_path: Path) -> None:
    """A worker draws what it would have drawn; one that has no state of its own draws something else."""

    def worker(comm: offbeat.Communicator) -> float:
        loop = Loop(comm, "diloco(every=3)")
        loop.sync.save(tmp_path)
        return float(torch.rand(()))

    drawn = offbeat.simulate(worker, 2)
    again = load(tmp_path, "diloco(every=3)", 3, lambda loop: float(torch.rand(())))
    assert again[:2] == drawn
    assert again[2] not in drawn


def test_one_file_per_rank_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a shared folder, what nobody sees does not count, and is said."""
    before = save(tmp_path, "local_sgd(every=3)", 3, 4, alone=True)
    with caplog.at_level(logging.WARNING, "offbeat"):
        after = load(tmp_path, "local_sgd(every=3)", 2, alone=True)
    for name, mean in mean_of(before[:2]).items():
        torch.testing.assert_close(after[0][name].double(), mean, rtol=1e-6, atol=1e-6)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].endswith("no rank sees the file of step 4 of rank 2, whose weights do not count.")
    where = f"load({str(tmp_path / '2')!r}, resize=True)"
    assert load(tmp_path, "local_sgd(every=3)", 4, alone=True)[2] == (
        f"{where}: rank 3 sees no file of a checkpoint: let all ranks share the folder, or copy any one of "
        "the files of the last step to each."
    )
    shutil.copytree(tmp_path / "1", tmp_path / "3")
    after = load(tmp_path, "local_sgd(every=3)", 4, alone=True)
    for name, mean in mean_of(before).items():
        torch.testing.assert_close(after[3][name].double(), mean, rtol=1e-6, atol=1e-6)


def test_the_newest_complete_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    save(kept, "diloco(every=3)", 3, 3)
    save(tmp_path / "later", "diloco(every=3)", 3, 4)
    for path in list((tmp_path / "later").iterdir())[1:]:
        shutil.copy(path, kept)
    with caplog.at_level(logging.WARNING, "offbeat"):
        assert load(kept, "diloco(every=3)", 2, lambda loop: loop.sync.steps) == [3, 3]
    assert caplog.records[0].getMessage() == (
        f"{kept}: the checkpoint of step 4 is ignored, because it is not complete."
    )
    # A damaged file is as good as none. Without another checkpoint, the rank that needs it says so.
    for path in kept.glob("*step-4*"):
        path.unlink()
    bad = kept / "offbeat-step-3-rank-1-of-3.pt"
    bad.write_bytes(bad.read_bytes()[:-100])
    assert load(kept, "diloco(every=3)", 2, lambda loop: loop.sync.steps) == [3, 3]
    for rank in (0, 2):
        (kept / f"offbeat-step-3-rank-{rank}-of-3.pt").unlink()
    mine, other = load(kept, "diloco(every=3)", 2)
    assert {mine.split(" is damaged")[0], other.split(" is damaged")[0]} == {
        f"load({str(kept)!r}, resize=True): a file of step 3 that rank {rank} needs" for rank in (0, 1)
    }
    assert load(tmp_path / "nothing", "diloco(every=3)", 2) == [None, None]


def test_as_many_workers_resume_from_a_folder(tmp_path: Path) -> None:
    """Residuals and live weights are kept: `resize=True` changes nothing if the number has not changed."""

    def worker(comm: offbeat.Communicator, resize: bool) -> Any:
        loop = Loop(comm, ROW)
        loop.sync.load(tmp_path, resize=resize)
        return loop.go(4, 9)

    save(tmp_path, ROW, 2, 4)
    plain, resized = (offbeat.simulate(lambda comm, r=r: worker(comm, r), 2) for r in (False, True))
    for one, other in zip(plain, resized, strict=True):
        assert all(same(a, b) for a, b in zip(one, other, strict=True))


def test_a_folder_of_a_method_that_cannot(tmp_path: Path) -> None:
    save(tmp_path, "noloco(every=2)", 4, 4)
    assert load(tmp_path, "noloco(every=2)", 4, lambda loop: loop.sync.steps) == [4] * 4
    assert (
        load(tmp_path, "noloco(every=2)", 3)
        == [
            f"load({str(tmp_path)!r}): the checkpoint is of 4 workers, this run has 3, and its workers meet "
            "in groups: start as many workers, or name another folder."
        ]
        * 3
    )


def over_gloo(comm: offbeat.Communicator, row: str, folder: str, steps: range) -> list[dict[str, Tensor]]:
    """Go on from the folder, if there is something in it, and save."""
    loop = Loop(comm, row, kind=Dyadic)
    loop.sync.load(folder, resize=True)
    trace = [snapshot(loop.net), *loop.go(steps.start, steps.stop)]
    loop.sync.save(folder)
    return trace


@pytest.mark.few(1)
@pytest.mark.parametrize("row", ["local_sgd(every=2, delay=1)", "slowmo(every=2, momentum=0.5, ramp=0)"])
def test_simulation_equals_gloo(row: str, pool: Pool, tmp_path: Path) -> None:
    """Four workers, then two, then four, each from the files of those before."""
    for number, (workers, steps) in enumerate(((4, range(3)), (2, range(3, 6)), (4, range(6, 9)))):
        real = pool.run(over_gloo, row, str(tmp_path / "real"), steps, workers=workers, fresh=number == 0)
        virtual = offbeat.simulate(
            lambda comm, steps=steps: over_gloo(comm, row, str(tmp_path / "virtual"), steps), workers
        )
        for one, other in zip(real, virtual, strict=True):
            assert all(same(a, b) for a, b in zip(one, other, strict=True))


def shards(comm: offbeat.Communicator, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Two replicas of two shards each; then each replica goes on as a run of one worker."""
    mesh = mesh_of_four()
    model = fully_shard(build(), mesh=mesh["shard"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sync = offbeat.local_sgd(model, opt, every=4, group=mesh["replica"])
    train(model, sync, opt, mesh["replica"].get_local_rank(), range(3))
    sync.save(folder)
    with sync.averaged():
        mean = weights(model)
    model = fully_shard(build(), mesh=mesh["shard"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sync = offbeat.local_sgd(model, opt, every=4, group=offbeat.Solo())
    assert sync.load(folder, resize=True)
    after = weights(model)
    train(model, sync, opt, 0, range(3, 5))
    return mean, after, sync.steps


@pytest.mark.slow
def test_shards(pool: Pool, tmp_path: Path) -> None:
    for mean, after, steps in pool.run(shards, str(tmp_path), fresh=True):
        assert steps == 5
        for name in mean:
            torch.testing.assert_close(after[name], mean[name])
