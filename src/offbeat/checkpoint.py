"""Does a checkpoint belong to this run? Every worker raises if one of them has the wrong one."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.comm import Communicator
from offbeat.errors import CheckpointMismatch, Disagreement
from offbeat.schedule import State

FORMAT = 1


def origin(method: str, comm: Communicator) -> State:
    """What a checkpoint says of the run it was taken from."""
    return {"format": FORMAT, "method": method, "workers": comm.size, "rank": comm.rank}


def check_origin(state: State, method: str, comm: Communicator) -> None:
    """The checkpoint is of this method, rank and number of workers, and of one step everywhere."""
    mismatch = _mismatch(state, origin(method, comm))
    heard = [word[0] for word in comm.tell([-1 if mismatch else state["steps"]]).wait()]
    if mismatch:
        raise CheckpointMismatch(mismatch)
    for rank, steps in enumerate(heard):
        if steps < 0:
            raise CheckpointMismatch(f"Rank {rank} cannot load its checkpoint: its own error says why.")
    for rank, steps in enumerate(heard):
        if steps != heard[0]:
            raise Disagreement(
                f"Checkpoints disagree: rank 0 loads step {heard[0]}, rank {rank} step {steps}."
            )


def _mismatch(state: State, ours: State) -> str | None:
    for what in ("format", "method", "workers"):
        if state.get(what) != ours[what]:
            return f"The checkpoint has {what} {state.get(what)}, this run has {ours[what]}."
    if state["rank"] != ours["rank"]:
        return (
            f"The checkpoint was written by rank {state['rank']}, this is rank {ours['rank']}: "
            "every rank loads its own."
        )
    return None


def copied(value: Any) -> Any:
    """A deep copy of tensors in dicts and lists."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value
