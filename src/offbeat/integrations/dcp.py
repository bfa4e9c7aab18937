"""Offbeat's state in a checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import io

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.base.clock import State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.files import load_plain
from offbeat.engine import saving
from offbeat.engine.run import Savable
from offbeat.engine.synchronizer import Synchronizer


class Stateful:
    """The weights, optimizers and synchronizer of this rank, and `others` such as a scheduler.

        state = {"app": Stateful(model, optimizer, sync, scheduler=scheduler)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)

    Save after a step, also with `async_save`: the state is copied at once. DCP keeps one copy of tensors that
    have the same name on several ranks, but the weights of workers differ. It cannot load a tensor that a new
    process does not have yet, such as an anchor. So each rank saves everything as one value of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | list[Optimizer],
        sync: Synchronizer,
        **others: Savable,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if model is not sync.model or [*map(id, optimizers)] != [*map(id, sync.optimizers)]:
            raise ValueError("Stateful(model, optimizer, sync): pass those that sync was made with.")
        self.sync, self.others = sync, others
        place = saving.Folder("", sync._comm, model)
        self._key, self._devices = f"rank-{sync._comm.rank}{place.shard}", place.devices

    def state_dict(self) -> State:
        """Return all that this rank needs to continue, as bytes under a name of its own."""
        file = io.BytesIO()
        torch.save(saving.to_plain(saving.capture(self.sync, self.others)), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned on this rank. Every rank calls it."""
        try:
            saved = load_plain(io.BytesIO(state[self._key]), self._devices)
        except ValueError as error:
            raise CheckpointMismatch(f"dcp.load(): {self._key} cannot read its state: {error}") from error
        saving.restore(self.sync, saved, self.others)
