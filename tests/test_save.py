"""`save` and `load`: one file per rank, whole on all ranks or ignored; the run continues to the bit."""

from __future__ import annotations

import logging
import os
import random
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import Pool
from problems import same, snapshot
from test_disagreement import attempt
from test_fsdp import build, loop, mesh_of_four
from test_resume import Run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.base.files import load_plain, write_state

STEPS, AT = 7, 4
# An anchor, a message in flight, a server, groups of workers, a wait-free method, a schedule that measures.
METHODS = [
    "diloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
    "local_sgd(every=3, delay=2)",
    "ssd_sgd(every=3, warmup=0, beta=0.25, in_flight=1, server=SGD(lr=1.0, momentum=0.5))",
    "noloco(every=2, lr=0.5, momentum=0.625, ramp=1)",
    "wagma(group_size=2, every=4, grace=60.0)",
    "adaptive(start=2, sample=4)",
]
Traces = list[dict[str, Tensor]]


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def interrupted(comm: offbeat.Communicator, expression: str, folder: str) -> tuple[Traces, Traces, bool]:
    """The end of a run that was saved on its way, that of one continued from there, and if draws agree."""
    torch.manual_seed(comm.rank)
    run = Run(comm, expression, "adamw", seed=comm.rank)
    run.go(0, AT)
    run.sync.save(folder, scheduler=run.scheduler)
    drawn = draw() if comm.size == 1 else ()
    whole = run.go(AT, STEPS) + run.end()
    torch.manual_seed(99)
    run = Run(comm, expression, "adamw", seed=7)
    assert run.sync.load(folder, scheduler=run.scheduler)
    again = draw() if comm.size == 1 else ()
    return whole, run.go(AT, STEPS) + run.end(), drawn == again


@pytest.mark.parametrize("expression", METHODS)
def test_a_run_continues_to_the_bit(expression: str, tmp_path: Path) -> None:
    for whole, resumed, _ in offbeat.simulate(lambda comm: interrupted(comm, expression, str(tmp_path)), 4):
        assert all(same(a, b) for a, b in zip(whole, resumed, strict=True))
    assert len(list(tmp_path.iterdir())) == 4


def test_random_numbers_continue(tmp_path: Path) -> None:
    assert interrupted(offbeat.Solo(), "local_sgd(every=3)", str(tmp_path))[2]


def several(comm: offbeat.Communicator, folder: str) -> list[tuple[Traces, Traces, bool]]:
    return [interrupted(comm, expression, f"{folder}/{i}") for i, expression in enumerate(METHODS[:5:2])]


@pytest.mark.slow
def test_over_gloo_too(pool: Pool, tmp_path: Path) -> None:
    for ended in pool.run(several, str(tmp_path), fresh=True):
        for whole, resumed, _ in ended:
            # The order of gloo's sums may depend on where a vector lies.
            for a, b in zip(whole, resumed, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def sharded(comm: offbeat.Communicator, folder: str) -> tuple[list[Tensor], list[Tensor], int, list[str]]:
    mesh = mesh_of_four()
    replica = mesh["replica"].get_local_rank()

    def make() -> Any:
        model = build()
        fully_shard(model, mesh=mesh["shard"])
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, opt, offbeat.diloco(model, opt, every=2, group=mesh["replica"])

    ends = []
    model, opt, sync = make()
    loop(model, sync, opt, replica, range(3))
    sync.save(folder)
    for _ in range(2):
        loop(model, sync, opt, replica, range(3, 6))
        sync.finish()
        ends.append([p.to_local().detach().clone() for p in model.parameters()])
        model, opt, sync = make()
        assert sync.load(folder)
    files = len(list(Path(folder).glob("*.pt")))
    said = []
    (own,) = Path(folder).glob(f"*-rank-{replica}-*-shard-{mesh['shard'].get_local_rank()}.pt")
    blocked = Path(folder) / f"blocked-{comm.rank}"
    if comm.rank == 3:
        own.write_bytes(own.read_bytes()[:-100])
        blocked.touch()
    for call, where in ((sync.save, str(blocked)), (sync.load, folder)):
        try:
            call(where)
        except (OSError, offbeat.CheckpointMismatch) as error:
            said.append(str(error).partition("): ")[2])
    return ends[0], ends[1], files, said


@pytest.mark.slow
def test_shards_are_saved_where_they_are(pool: Pool, tmp_path: Path) -> None:
    for rank, (whole, resumed, files, said) in enumerate(pool.run(sharded, str(tmp_path), fresh=True)):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
        assert files == 4
        unwritten, damaged = said  # on all ranks, although ranks 0 and 2 hold other shards than rank 3
        if rank == 3:
            assert unwritten.startswith("rank 1 cannot write its file: ")
            assert damaged.startswith("rank 1's file of step 3 is damaged (")
        else:
            assert unwritten == "another rank cannot write its file; see its error."
            assert damaged == "the file of rank 1 is damaged: see its error."


class Killed(BaseException):
    pass


def die_after(folder: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int) -> None:
    """Two workers save after `first` steps. In the next save, rank 1 dies before it writes."""

    def worker(comm: offbeat.Communicator) -> None:
        run = Run(comm, "local_sgd(every=3, delay=2)", "momentum", seed=0)
        run.go(0, first)
        run.sync.save(folder)
        run.go(first, second)
        if comm.rank == 1:
            monkeypatch.setattr("torch.save", torn)
        run.sync.save(folder)

    def torn(state: object, file: Any) -> None:
        file.write(b"half")
        raise Killed

    with monkeypatch.context() as monkeypatch, pytest.raises(Killed):
        offbeat.simulate(worker, 2)


def begin(folder: Path, expression: str = "local_sgd(every=3, delay=2)", workers: int = 2) -> list[Any]:
    def worker(comm: offbeat.Communicator) -> int | str:
        run = Run(comm, expression, "momentum", seed=7)
        try:
            return run.sync.steps if run.sync.load(folder) else "nothing"
        except offbeat.OffbeatError as error:
            return str(error)

    return offbeat.simulate(worker, workers)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_between_two_writes_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    die_after(tmp_path, monkeypatch, 2, 4)
    old, new = "offbeat-step-2-rank-{}-of-2.pt", "offbeat-step-4-rank-{}-of-2.pt"
    if new.format(0) not in names(tmp_path):  # rank 1 was first
        (tmp_path / new.format(0)).write_bytes((tmp_path / old.format(0)).read_bytes())
    (tmp_path / f".{new.format(1)}.77").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, "offbeat"):
        assert begin(tmp_path) == [2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: the checkpoint of step 4 is ignored, because rank 1 has no whole file of it; "
        "continuing from step 2."
    ]
    assert [name for name in names(tmp_path) if name[0] != "."] == [old.format(0), old.format(1)]
    offbeat.simulate(lambda comm: Run(comm, "local_sgd()", "momentum", seed=0).sync.save(tmp_path), 2)
    assert names(tmp_path) == [f"offbeat-step-0-rank-{rank}-of-2.pt" for rank in range(2)]


def test_a_torn_file_is_ignored_if_there_is_another_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        run = Run(comm, "local_sgd(every=3, delay=2)", "momentum", seed=0)
        run.go(0, 2)
        run.sync.save(tmp_path)
        kept = {path: path.read_bytes() for path in tmp_path.glob(f"*-rank-{comm.rank}-*")}
        run.go(2, 4)
        run.sync.save(tmp_path)
        for path, whole in kept.items():
            path.write_bytes(whole)

    offbeat.simulate(worker, 2)
    last = tmp_path / "offbeat-step-4-rank-1-of-2.pt"
    last.write_bytes(last.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "offbeat"):
        assert begin(tmp_path) == [2, 2]
    assert "step 4 is ignored, because rank 1 has no whole file of it; continuing" in caplog.text
    other = tmp_path / "offbeat-step-2-rank-0-of-2.pt"
    other.write_bytes(other.read_bytes()[:-100])
    mine, theirs = begin(tmp_path)
    assert mine.startswith(f"load({str(tmp_path)!r}): rank 0's file of step 2 is damaged (")
    assert mine.endswith("), and there is no other checkpoint: to start over, name another folder.")
    assert theirs == f"load({str(tmp_path)!r}): the file of rank 0 is damaged: see its error."
    other.unlink()
    assert begin(tmp_path) == ["nothing"] * 2
    assert "because rank 0 has no whole file of it; there is no earlier one." in caplog.text


def test_tensors_return_to_a_device_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a GPU that this process does not use. "meta" stands for the device that it does use."""

    def devices(saved: str, *own: str) -> str:
        monkeypatch.setattr("torch.serialization.location_tag", lambda storage: saved)
        write_state(tmp_path / "state.pt", {"x": torch.ones(3)})
        return str(load_plain(tmp_path / "state.pt", own)["x"].device)

    assert devices("cuda:7") == "cpu"
    assert devices("cuda:7", "meta") == "meta"
    assert devices("cpu", "meta") == "cpu"


def test_a_file_and_its_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, flush = [], os.fsync

    def see(descriptor: int) -> None:
        names.append((os.stat(descriptor).st_ino, [path.name for path in tmp_path.iterdir()]))
        flush(descriptor)

    monkeypatch.setattr("os.fsync", see)
    write_state(tmp_path / "state.pt", {})
    inodes = [path.stat().st_ino for path in (tmp_path / "state.pt", tmp_path)]
    assert names == [(inodes[0], [f".state.pt.{os.getpid()}"]), (inodes[1], ["state.pt"])]


def test_each_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        run.go(0, 2)
        run.sync.save(tmp_path)
        for step in (1, 3):  # of which rank 1 has only the first
            if comm.rank == 0 or step == 1:
                path = tmp_path / f"offbeat-step-{step}-rank-{comm.rank}-of-2.pt"
                path.write_bytes((tmp_path / f"offbeat-step-2-rank-{comm.rank}-of-2.pt").read_bytes())

    offbeat.simulate(worker, 2)
    checked: list[str] = []
    whole = zipfile.ZipFile.testzip
    monkeypatch.setattr(
        zipfile.ZipFile, "testzip", lambda file: (checked.append(Path(file.filename).name), whole(file))[1]
    )
    assert begin(tmp_path, "local_sgd(every=3)") == [2, 2]
    assert sorted(checked) == [f"offbeat-step-2-rank-{rank}-of-2.pt" for rank in range(2)]


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        run.go(0, 2)
        run.sync.save(tmp_path)

    offbeat.simulate(worker, 2)
    assert begin(tmp_path / "elsewhere") == ["nothing"] * 2
    assert (
        begin(tmp_path, "local_sgd(every=4)")
        == ["The checkpoint has method local_sgd(every=3), this run has local_sgd(every=4)."] * 2
    )
    where = f"load({str(tmp_path)!r})"
    assert (
        begin(tmp_path, workers=3)
        == [
            f"{where}: the checkpoint is of 2 workers, this run has 3: start as many workers, pass "
            "resize=True, or name another folder."
        ]
        * 3
    )

    def other(comm: offbeat.Communicator, **given: Any) -> str:
        net = nn.Linear(2, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        before = snapshot(net)
        with pytest.raises(offbeat.CheckpointMismatch) as error:
            offbeat.local_sgd(net, opt, every=3, group=comm).load(tmp_path)
        assert same(before, snapshot(net))
        return str(error.value)

    assert (
        offbeat.simulate(other, 2)
        == [
            "The checkpoint has nothing for 'weight', the model has [1, 2] torch.float32: build the model "
            "as it was."
        ]
        * 2
    )

    def forgetful(comm: offbeat.Communicator) -> str:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        run.sync.save(tmp_path / "more", scheduler=run.scheduler)
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        with pytest.raises(offbeat.CheckpointMismatch) as error:
            run.sync.load(tmp_path / "more")
        return str(error.value)

    assert (
        offbeat.simulate(forgetful, 2)
        == ["load(): the checkpoint was saved with scheduler=...: pass it to load(), too."] * 2
    )

    def scaled(comm: offbeat.Communicator) -> str:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        with pytest.raises(offbeat.CheckpointMismatch) as error:
            run.sync.load(tmp_path, scheduler=run.scheduler)
        return str(error.value)

    assert (
        offbeat.simulate(scaled, 2)
        == ["load(scheduler=...): the checkpoint was saved without it: pass it to save(), too."] * 2
    )


def test_a_full_disk_is_one_sentence_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 1 only: first its disk is full, then its folder cannot be made."""
    blocked, save = tmp_path / "file" / "folder", torch.save

    def full(state: object, file: Any) -> None:
        if "step-2-rank-1" in file.name:
            raise RuntimeError("no space left")
        save(state, file)

    def worker(comm: offbeat.Communicator) -> list[str]:
        run, said = Run(comm, "local_sgd(every=3)", "momentum", seed=0), []
        run.go(0, 1)
        run.sync.save(tmp_path)
        for step in (1, 2):
            run.go(step, step + 1)
            with pytest.raises(OSError, match=r"^save\(") as error:
                run.sync.save(blocked if step == 2 and comm.rank == 1 else tmp_path)
            said.append(str(error.value))
        return said

    monkeypatch.setattr("torch.save", full)
    blocked.parent.touch()
    theirs, ours = offbeat.simulate(worker, 2)
    where = f"save({str(tmp_path)!r})"
    assert theirs == [f"{where}: another rank cannot write its file; see its error."] * 2
    assert ours[0] == f"{where}: rank 1 cannot write its file: no space left"
    assert ours[1].startswith(f"save({str(blocked)!r}): rank 1 cannot write its file: ")
    assert begin(tmp_path, "local_sgd(every=3)") == [1, 1]


class Counts:
    """Something to save whose state is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any, offbeat.Synchronizer, Counts]:
        net = nn.Linear(2, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: numpy.cos(step / 10))
        net(torch.ones(2)).backward()
        counts = Counts([numpy.int64(3), {numpy.int64(4): (numpy.bool_(True), {1}, OrderedDict(a=b"b"))}])
        return opt, scheduler, offbeat.local_sgd(net, opt, group=offbeat.Solo()), counts

    opt, scheduler, sync, counts = make()
    sync.step()
    scheduler.step()
    assert type(opt.param_groups[0]["lr"]) is numpy.float64
    sync.save(tmp_path, scheduler=scheduler, counts=counts)
    resumed, again, sync, empty = make()
    empty.state = None
    assert sync.load(tmp_path, scheduler=again, counts=empty)
    assert resumed.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    assert again.last_epoch == 1
    assert empty.state == counts.state
    assert type(empty.state[0]) is int


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (numpy.ones(2), "numpy.ndarray"),
        (numpy.longdouble(1), "numpy.longdouble"),
        (defaultdict(list), "collections.defaultdict"),
        (Path("a"), "pathlib.PosixPath"),
        (draw, "builtins.function"),
    ],
)
def test_what_could_not_be_read_is_not_written(value: object, kind: str, tmp_path: Path) -> None:
    """On rank 1 only. Both ranks keep the checkpoint before, and can go on."""

    def worker(comm: offbeat.Communicator) -> str:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        run.go(0, 1)
        run.sync.save(tmp_path)
        run.go(1, 2)
        with pytest.raises((TypeError, OSError)) as error:
            run.sync.save(tmp_path, counts=Counts([0, {"a": value if comm.rank == 1 else 0}]))
        run.go(2, 4)
        return str(error.value)

    where = f"save({str(tmp_path)!r})"
    assert offbeat.simulate(worker, 2) == [
        f"{where}: another rank cannot write its file; see its error.",
        f"{where}: rank 1 cannot write its file: others['counts']['state'][1]['a'] is a {kind}, which "
        "torch.load(weights_only=True) refuses: keep numbers, strings, tensors, lists and dicts in it.",
    ]
    assert begin(tmp_path, "local_sgd(every=3)") == [1, 1]


def test_a_file_that_torch_refuses_is_one_sentence(tmp_path: Path) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
        run.sync.save(tmp_path)

    offbeat.simulate(worker, 2)
    torch.save({"lr": numpy.float64(1)}, tmp_path / "offbeat-step-0-rank-1-of-2.pt")
    where = f"load({str(tmp_path)!r})"
    for answer in begin(tmp_path, "local_sgd(every=3)"):
        assert answer.startswith(f"{where}: rank 1 cannot read its file of step 0: it holds a numpy.")
        assert answer.endswith("multiarray.scalar, and files are read with weights_only=True")


def alone(comm: offbeat.Communicator, call: str, at: tuple[int, int], folder: str) -> None:
    """Each rank has saved after step 2, and then calls `call` after a step of its own; -1 is never."""
    run = Run(comm, "local_sgd(every=3)", "momentum", seed=0)
    if 0 not in at:
        run.go(0, 2)
        run.sync.save(folder)
    for step in range(run.sync.steps, 8):
        if step == at[comm.rank]:
            getattr(run.sync, call)(folder)
        run.go(step, step + 1)
    run.end()


# The call, the steps after which rank 0 and rank 1 make it, and where rank 1 is meanwhile.
ALONE = [
    ("save", (4, -1), "in save() at step 4, rank 1 in round 1 at step 6"),
    ("load", (4, -1), "in load() at step 4, rank 1 in round 1 at step 6"),
    ("save", (3, 5), "in save() at step 3, rank 1 in save() at step 5"),
    ("load", (3, 4), "in load() at step 3, rank 1 in load() at step 4"),
    ("save", (0, -1), "in save() at step 0, rank 1 in round 0 at step 3"),
    ("load", (0, -1), "in load() at step 0, rank 1 at step 0"),
]


def check_alone(answers: list[Any], folder: Path, where: str) -> None:
    assert [type(answer) for answer in answers] == [offbeat.Disagreement] * 2, answers
    assert str(answers[0]) == str(answers[1])
    assert str(answers[0]).startswith(f"Workers disagree: rank 0 is {where}. ")
    if where == "in load() at step 0, rank 1 at step 0":
        assert str(answers[0]).endswith("Call load() on every rank, before the first step.")
    # The last checkpoint is still there.
    assert begin(folder, "local_sgd(every=3)") == (["nothing"] * 2 if "step 0" in where else [2, 2])


@pytest.mark.parametrize(("call", "at", "where"), ALONE)
def test_ranks_that_do_not_save_together_disagree(
    call: str, at: tuple[int, int], where: str, tmp_path: Path
) -> None:
    check_alone(attempt(alone, call, at, str(tmp_path), workers=2), tmp_path, where)


@pytest.mark.parametrize(("call", "at", "where"), ALONE)
def test_ranks_that_do_not_save_together_disagree_over_gloo(
    pool: Pool, call: str, at: tuple[int, int], where: str, tmp_path: Path
) -> None:
    check_alone(pool.attempt(alone, call, at, str(tmp_path), workers=2), tmp_path, where)


NAMES = {"bytes_sent_total", "bytes_received_total", "seconds_waited", "seconds_hidden", "round", "late"}
LATER = {"bytes_sent_round", "drift", "period", "seconds_waited_mean", "seconds_waited_max"}


def test_metrics_are_numbers_and_send_nothing() -> None:
    """Waiting is told apart: rank 1 is slow, so the others wait for it."""

    def worker(comm: offbeat.Communicator) -> tuple[dict[str, float], ...]:
        run = Run(comm, "local_sgd(every=2)", "momentum", seed=0)
        first, told = run.sync.metrics(), list[dict[str, float]]()
        run.sync.on_report = lambda report: told.append(run.sync.metrics())
        run.go(0, 6)
        before = run.sync.totals.bytes_sent
        last = run.sync.metrics()
        assert run.sync.totals.bytes_sent == before == last["offbeat/bytes_sent_total"]
        assert told[-1] == last
        assert len(told) == 3
        return first, last

    answers = offbeat.simulate(worker, 3, compute=lambda rank, step: 0.5 if rank == 1 else 0.1)
    for rank, (first, last) in enumerate(answers):
        assert set(first) == {f"offbeat/{name}" for name in NAMES | {"step", "workers"}}
        assert set(last) - set(first) == {f"offbeat/{name}" for name in LATER}
        assert all(type(value) is float for value in last.values())
        assert last["offbeat/round"] == 3
        assert last["offbeat/period"] == 2
        assert last["offbeat/step"] == 6
        assert last["offbeat/workers"] == 3
        assert last["offbeat/drift"] > 0
        assert last["offbeat/seconds_waited"] == pytest.approx(0.0 if rank == 1 else 2.4, abs=0.01)
        # as of the beginning of the last round
        assert last["offbeat/seconds_waited_max"] == pytest.approx(1.6, abs=0.01)
        assert last["offbeat/seconds_waited_mean"] == pytest.approx(3.2 / 3, abs=0.01)


def test_late_rounds_are_counted() -> None:
    def worker(comm: offbeat.Communicator) -> float:
        run = Run(comm, "wagma(group_size=2, every=8)", "momentum", seed=0)
        run.go(0, 8)
        return run.sync.metrics()["offbeat/late"]

    late = offbeat.simulate(worker, 2, compute=lambda rank, step: 1.0 if rank == 1 else 0.1)
    assert late[1] > 0 == late[0]


def test_optimizers_stay_still() -> None:
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = offbeat.local_sgd(net, opt, group=offbeat.Solo())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    before = snapshot(net)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with sync.still():
        assert opt.step(closure) is not None
        scheduler.step()  # and does not warn
    assert same(before, snapshot(net))
    opt.step()
    assert not same(before, snapshot(net))
