"""Offbeat in checkpoints of torch.distributed.checkpoint, and the consensus as one file."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Pool
from problems import Realistic, same, snapshot
from test_fsdp import build, mesh_of_four
from test_resume import Run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.integrations.dcp import Stateful

EXPRESSIONS = ["diloco(every=3, lr=0.5, momentum=0.625, ramp=1)", "local_sgd(every=3, delay=2)"]


def continued(comm: offbeat.Communicator, expression: str, folder: str, asynchronous: bool) -> bool:
    """Whether a run that another process could continue ends as the uninterrupted one, to the bit."""
    torch.manual_seed(comm.rank)
    run = Run(comm, expression, "adamw", seed=comm.rank)
    run.go(0, 4)
    app: dict[str, Any] = {"app": Stateful(run.net, run.opt, run.sync, scheduler=run.scheduler)}
    saving = None
    if asynchronous:
        saving = dcp.async_save(app, checkpoint_id=folder)
    else:
        dcp.save(app, checkpoint_id=folder)
    whole = run.go(4, 7) + run.end()
    if saving is not None:
        saving.result()
    torch.manual_seed(99)
    run = Run(comm, expression, "adamw", seed=7)
    app = {"app": Stateful(run.net, run.opt, run.sync, scheduler=run.scheduler)}
    dcp.load(app, checkpoint_id=folder)
    again = run.go(4, 7) + run.end()
    return all(same(a, b) for a, b in zip(whole, again, strict=True))


def everything(comm: offbeat.Communicator, folder: str) -> list[bool]:
    ways = [(expression, late) for expression in EXPRESSIONS for late in (False, True)]
    return [continued(comm, way[0], f"{folder}/{i}", way[1]) for i, way in enumerate(ways)]


@pytest.mark.slow
def test_a_run_continues_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(everything, str(tmp_path), fresh=True) == [[True] * 4] * 4


def test_parts_of_another_run_are_refused() -> None:
    run, other = (Run(offbeat.Solo(), "local_sgd(every=3)", "adamw", seed=0) for _ in range(2))
    with pytest.raises(ValueError, match=r"^Stateful\(model, optimizer, sync\): pass those that sync was"):
        Stateful(run.net, other.opt, run.sync)


def test_numbers_of_numpy_and_states_of_others() -> None:
    run, other = (Run(offbeat.Solo(), "local_sgd(every=3)", "adamw", seed=0) for _ in range(2))
    run.opt.param_groups[0]["lr"] = numpy.float64(0.125)
    saved = Stateful(run.net, run.opt, run.sync).state_dict()
    Stateful(other.net, other.opt, other.sync).load_state_dict(saved)
    assert other.opt.param_groups[0]["lr"] == 0.125
    run.opt.param_groups[0]["lr"] = numpy.ones(1)
    sentence = re.escape("optimizers[0]['param_groups'][0]['lr'] is a numpy.ndarray, which torch.load(")
    with pytest.raises(TypeError, match=f"^{sentence}"):
        Stateful(run.net, run.opt, run.sync).state_dict()
    file = io.BytesIO()
    torch.save(numpy.float64(1), file)
    with pytest.raises(offbeat.CheckpointMismatch, match=r"^dcp\.load\(\): rank-0 cannot read its state: "):
        Stateful(run.net, run.opt, run.sync).load_state_dict({"rank-0": file.getvalue()})


class Tied(Realistic):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.again = self.body[0]


def exported(comm: offbeat.Communicator, folder: Path) -> dict[str, Tensor]:
    """What `averaged()` shows."""
    net = Tied(comm.rank)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = offbeat.local_sgd(net, opt, every=4, group=comm)
    for step in range(6):
        net(torch.ones(7) * (comm.rank + step)).backward()
        sync.step()
    before = snapshot(net)
    sync.export(folder / "model.safetensors")
    sync.export(str(folder / "model.pt"))
    assert same(before, snapshot(net))
    with sync.averaged():
        return snapshot(net)


def test_the_consensus_is_one_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    seen = offbeat.simulate(lambda comm: exported(comm, tmp_path), 2)[0]
    for loaded in (
        load_file(tmp_path / "model.safetensors"),
        torch.load(tmp_path / "model.pt", weights_only=True),
    ):
        net = Tied(3)
        net.load_state_dict(loaded)
        assert same(snapshot(net), seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.safetensors"]


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(2, 1)

    def worker(comm: offbeat.Communicator, path: str) -> str:
        sync = offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=0.1), group=comm)
        with pytest.raises((ValueError, ImportError, OSError)) as error:
            sync.export(path)
        return str(error.value)

    def answers(path: str) -> list[str]:
        return offbeat.simulate(lambda comm: worker(comm, path), 2)

    assert answers("model") == ["export('model'): the file must be a .safetensors or a .pt."] * 2
    (tmp_path / "file").touch()
    path = str(tmp_path / "file/model.pt")
    ours, theirs = answers(path)
    assert ours.startswith(f"export({path!r}): ")
    assert theirs == f"export({path!r}): rank 0 cannot write the file; see its error."
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = "export('model.safetensors'): pip install safetensors, or name a .pt."
    assert answers("model.safetensors") == [sentence] * 2


def gathered(comm: offbeat.Communicator, path: str) -> tuple[bool, str]:
    """Whether the file holds the whole model, although every rank has a shard, and what a bad path says."""
    mesh = mesh_of_four()
    model = build()
    whole = snapshot(model)
    fully_shard(model, mesh=mesh["shard"])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.local_sgd(model, opt, every=2, group=mesh["replica"])
    sync.export(path)
    comm.tell([]).wait()
    with pytest.raises(OSError, match=r"^export\(") as error:
        sync.export(f"{path}/inside.pt")
    return same(torch.load(path, weights_only=True), whole), str(error.value)


@pytest.mark.slow
def test_shards_are_gathered(pool: Pool, tmp_path: Path) -> None:
    (whole, _), *others = pool.run(gathered, str(tmp_path / "model.pt"), fresh=True)
    path = str(tmp_path / "model.pt/inside.pt")
    sentence = f"export({path!r}): rank 0 cannot write the file; see its error."
    assert whole
    assert others == [(True, sentence)] * 3
