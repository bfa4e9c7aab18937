"""Checkpoints in a folder, one file per rank. The newest one that every rank has is loaded."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import get_safe_globals

from offbeat.base.clock import State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.files import delete_torn, find_damage, load_plain, write_state
from offbeat.base.tensors import clean_names, is_sharded, local
from offbeat.comm.communicator import WORDS, Communicator
from offbeat.engine.part import paused
from offbeat.engine.report import logger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from offbeat.engine.run import Run, Savable

_FILE = re.compile(r"offbeat-step-(\d+)-rank-(\d+)-of-(\d+)((?:-shard-[\d.]+)?)\.pt")
# What torch.load(weights_only=True) reads, besides lists, tuples, sets and dicts.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, Counter),
    *(Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device),
)
_SAVED = WORDS - 2  # how many checkpoints a rank tells the others about


class Folder:
    """The checkpoints of a run in a folder, as one rank sees them.

    A rank needs to see only its own files. Ranks that hold shards of one replica count as ranks, too.
    """

    def __init__(self, folder: str | Path, comm: Communicator, model: nn.Module) -> None:
        self.folder, self.comm = Path(folder), comm
        self.mesh, self.devices = find_mesh(model), [*map(str, _devices(model))]
        self.shard = ""
        if self.mesh is not None:
            self.shard = "-shard-" + ".".join(map(str, self.mesh.get_coordinate() or ()))

    def write(self, step: int, state: State) -> None:
        """Write this rank's file. Once every rank has done so, delete this rank's older ones."""
        # With rounds by the clock, workers make different numbers of steps. The largest one names all files.
        step = max(words[0] for words in self.comm.tell([step]).wait())
        path, error = self._path(step), None
        delete_torn(self._path("*"))
        try:
            write_state(path, to_plain(state))
        except (OSError, RuntimeError, TypeError) as reason:  # torch turns a full disk into a RuntimeError
            error = reason
        written = self._common(self.comm.tell([] if error else [step + 1]).wait())
        if error is not None:
            kind = TypeError if isinstance(error, TypeError) else OSError
            raise kind(f"save({str(self.folder)!r}): rank {self.comm.rank} cannot write its file: {error}")
        if not written:
            raise OSError(f"save({str(self.folder)!r}): another rank cannot write its file; see its error.")
        for other, rank, workers in self.list_files():  # files of another number of workers are obsolete
            if other != step and (workers != self.comm.size or rank == self.comm.rank):
                self.path(other, rank, workers).unlink(missing_ok=True)

    def newest(self, advice: str) -> int | None:
        """Return the last step that is complete on every rank. Raise, with advice, if no file fits."""
        own, damaged, whole = self._steps(), dict[int, str](), -1
        other = 0 if own else max((int(found[3]) for found in self._files()), default=0)
        while True:  # only a file that every rank has is worth checking
            steps = sorted(own)[-_SAVED:]
            rows = self.comm.tell([len(damaged), other, *[step + 1 for step in steps]]).wait()
            newest = max(self._common([row[2:] for row in rows]), default=-1)
            if newest in (whole, -1):
                break
            whole = newest
            if damage := find_damage(self._path(newest)):
                damaged[newest] = damage
                own.remove(newest)
        if newest < 0:
            self._refuse(rows, damaged, advice)
        seen = {word - 1 for row in rows for word in row[2:] if word} | damaged.keys()
        if ignored := sorted(step for step in seen if step > newest):
            self._warn(ignored[-1], newest, rows)
        for step in own | damaged.keys() if newest >= 0 else ():
            if step > newest:  # the run writes it again
                self._path(step).unlink(missing_ok=True)
        return None if newest < 0 else newest

    def read(self, step: int, rank: int, workers: int) -> State:
        """Return the state in the file of a rank, which is complete."""
        try:
            return load_plain(self.path(step, rank, workers), self.devices)
        except ValueError as error:
            where = f"load({str(self.folder)!r}): rank {self.comm.rank}"
            raise CheckpointMismatch(f"{where} cannot read its file of step {step}: {error}") from error

    def _refuse(self, rows: Sequence[Sequence[int]], damaged: dict[int, str], advice: str) -> None:
        where = f"load({str(self.folder)!r})"
        bad = max(rank + 1 if row[0] else 0 for rank, row in enumerate(rows))
        words = [bad, max(row[1] for row in rows), int(any(any(row[2:]) for row in rows))]
        bad, workers, fitting = map(max, zip(*tell_shards(words, self.mesh), strict=True))
        for step, reason in damaged.items():
            raise CheckpointMismatch(
                f"{where}: rank {self.comm.rank}'s file of step {step} is damaged ({reason}), and there is "
                "no other checkpoint: to start over, name another folder."
            )
        if bad:
            raise CheckpointMismatch(f"{where}: the file of rank {bad - 1} is damaged: see its error.")
        if workers and not fitting:
            raise CheckpointMismatch(
                f"{where}: the checkpoint is of {workers} workers, this run has {self.comm.size}{advice}"
            )

    def _warn(self, ignored: int, newest: int, rows: Sequence[Sequence[int]]) -> None:
        lacking = ", ".join(str(rank) for rank, row in enumerate(rows) if ignored + 1 not in row[2:])
        then = "there is no earlier one" if newest < 0 else f"continuing from step {newest}"
        if self.comm.rank == 0:
            logger.warning(
                "%s: the checkpoint of step %d is ignored, because %s has no whole file of it; %s.",
                self.folder, ignored, f"rank {lacking}" if lacking else "a shard", then,
            )  # fmt: skip

    def path(self, step: int | str, rank: int, workers: int) -> Path:
        return self.folder / f"offbeat-step-{step}-rank-{rank}-of-{workers}{self.shard}.pt"

    def _path(self, step: int | str) -> Path:
        return self.path(step, self.comm.rank, self.comm.size)

    def list_files(self) -> list[tuple[int, int, int]]:
        """Return step, rank and number of workers of every file of this shard."""
        return [(int(f[1]), int(f[2]), int(f[3])) for f in self._files() if f[4] == self.shard]

    def _files(self) -> list[re.Match[str]]:
        names = [path.name for path in self.folder.glob("offbeat-step-*.pt")]
        return [found for name in names if (found := _FILE.fullmatch(name))]

    def _steps(self) -> set[int]:
        return {step for step, *place in self.list_files() if place == [self.comm.rank, self.comm.size]}

    def _common(self, rows: Sequence[Sequence[int]]) -> set[int]:
        """Return the steps in all rows, each plus 1, on every shard of the model."""
        common = set.intersection(*map(set, rows)) - {0}
        shards = tell_shards([*sorted(common), *[0] * (WORDS - len(common))], self.mesh)
        return {word - 1 for word in set.intersection(*map(set, shards)) - {0}}


def find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which the model is sharded, if it is."""
    return next((p.device_mesh for p in model.parameters() if is_sharded(p)), None)


def tell_shards(words: Sequence[int], mesh: DeviceMesh | None) -> list[list[int]]:
    """Return the words of every shard of this replica. All shards pass equally many."""
    rows = [list(words)]
    if mesh is None:
        return rows
    for group in mesh.get_all_groups():
        own = torch.tensor(rows, device=mesh.device_type)
        others = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, own, group=group)
        rows = [row for other in others for row in other.tolist()]
    return rows


def capture(sync: Run, others: Mapping[str, Savable]) -> State:
    """Return all that this rank needs to continue: weights, buffers and optimizers as local shards."""
    own = sync.state_dict()  # may wait for a round, which is counted
    with paused(sync.parts):
        return {
            "sync": own,
            "model": {name: local(tensor) for name, tensor in _tensors(sync.model).items()},
            "optimizers": [_take_local(optimizer.state_dict()) for optimizer in sync.optimizers],
            "rng": random_states(sync.model),
            "others": {name: other.state_dict() for name, other in others.items()},
        }


def to_plain(value: Any, where: str = "") -> Any:
    """Return the value with NumPy's numbers as Python's. Raise if `weights_only` would refuse it."""
    kind, inside = type(value), f"{where}[{{!r}}]" if where else "{}"
    if kind.__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        value, kind = value.item(), type(value.item())
    if kind in (dict, OrderedDict):
        return kind((to_plain(key, where), to_plain(item, inside.format(key))) for key, item in value.items())
    if kind in (list, tuple, set):
        return kind(to_plain(item, inside.format(i)) for i, item in enumerate(value))
    if kind not in _PLAIN and kind not in get_safe_globals():
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) "
            "refuses: keep numbers, strings, tensors, lists and dicts in it."
        )
    return value


def restore(sync: Run, state: State, others: Mapping[str, Savable], *, resize: bool = False) -> None:
    """Restore what `capture` returned. Every rank calls it. It raises before the model changes."""
    sync.load_state_dict(state["sync"], resize=resize)
    with sync._failing():
        _check(state, others, sync.model, sync.optimizers)
        _write(state, sync.model, sync.optimizers)
        for name, other in others.items():
            other.load_state_dict(state["others"][name])
        if state["sync"]["rank"] == sync._comm.rank:  # otherwise two ranks would draw the same numbers
            set_random_states(state["rng"], sync.model)


def _check(state: State, others: Collection[str], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise unless weights, buffers and optimizers fit, and the others are those that were saved."""
    saved, own = (
        {name: (list(t.shape), t.dtype) for name, t in tensors.items()}
        for tensors in (state["model"], {name: local(t) for name, t in _tensors(model).items()})
    )
    for name in {**own, **saved}:
        if saved.get(name) != own.get(name):
            theirs, ours = (f"{d[name][0]} {d[name][1]}" if name in d else "nothing" for d in (saved, own))
            raise CheckpointMismatch(
                f"The checkpoint has {theirs} for {name!r}, the model has {ours}: build the model as it was."
            )
    if len(state["optimizers"]) != len(optimizers):
        raise CheckpointMismatch(
            f"The checkpoint has {len(state['optimizers'])} optimizers, this run has {len(optimizers)}."
        )
    if missing := [name for name in others if name not in state["others"]]:
        raise CheckpointMismatch(
            f"load({missing[0]}=...): the checkpoint was saved without it: pass it to save(), too."
        )
    if unused := [name for name in state["others"] if name not in others]:
        raise CheckpointMismatch(
            f"load(): the checkpoint was saved with {unused[0]}=...: pass it to load(), too."
        )


@torch.no_grad()
def _write(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Restore weights, buffers and optimizers."""
    for name, tensor in _tensors(model).items():
        local(tensor).copy_(state["model"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            index: {key: _shard_like(value, parameters[index]) for key, value in own.items()}
            for index, own in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": states})


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return clean_names([*model.named_parameters(), *model.named_buffers()])


def _take_local(value: Any) -> Any:
    """Return the value with each sharded tensor replaced by its local shard."""
    if torch.is_tensor(value):
        return value.to_local() if is_sharded(value) else value
    if isinstance(value, dict):
        return {key: _take_local(item) for key, item in value.items()}
    return type(value)(map(_take_local, value)) if type(value) in (list, tuple) else value


def _shard_like(value: Any, parameter: Tensor) -> Any:
    """Return a local shard as a sharded tensor, if it belongs to a sharded parameter."""
    if not torch.is_tensor(value) or not is_sharded(parameter) or value.shape != parameter.to_local().shape:
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


def _devices(model: nn.Module) -> Iterable[torch.device]:
    """Return the devices of the model other than the CPU, in order."""
    return sorted({p.device for p in model.parameters()} - {torch.device("cpu")}, key=str)


def random_states(model: nn.Module) -> State:
    states: State = {"python": random.getstate(), "torch": torch.get_rng_state()}
    states["devices"] = [torch.get_device_module(d).get_rng_state(d) for d in _devices(model)]
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def set_random_states(states: State, model: nn.Module) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    for device, state in zip(_devices(model), states["devices"], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(states["numpy"]))
