"""A checkpoint from which a run continues, with the same number of workers or another one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offbeat.base.clock import State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.packed import Packed
from offbeat.base.tensors import local, trainable
from offbeat.comm.communicator import Communicator
from offbeat.engine import agreement
from offbeat.engine.extras import Buffers
from offbeat.engine.part import Landing, Part
from offbeat.engine.report import logger
from offbeat.engine.transfer import share, why_unshared

if TYPE_CHECKING:
    from offbeat.engine.run import Run

Tensors = Mapping[str, Tensor]


def may_resize(run: Run, state: State) -> bool:
    """Whether any worker can continue from any file. Raise if not, and the number of workers has changed."""
    reason, workers, size = why_unshared(run.parts), state.get("workers"), run._comm.size
    if reason is not None and workers != size and state.get("method") == run.method:
        raise CheckpointMismatch(
            f"load_state_dict(resize=True): {run.method} cannot continue a checkpoint of {workers} workers "
            f"with {size}, because {reason}: start {workers} workers, or a new run from exported weights."
        )
    return reason is None


class Loaded:
    """A checkpoint that was loaded, until the model has the weights to continue with.

    `ranks` are the ranks of the files that the workers have loaded, or None if each has its own. If they are
    not, `weights` may be set to those of further workers of the checkpoint, which then count as well.
    """

    def __init__(self, state: State, run: Run, *, resize: bool) -> None:
        comm, self._state = run._comm, state
        seen, ranks = agreement.check_origin(state, run.method, run.model, comm, resize=resize)
        self._unseen: int | None = None if seen else state["weights"]
        moved = state["workers"] != comm.size or ranks != list(range(comm.size))
        self.ranks = ranks if moved and state["started"] else None
        self.weights: Sequence[Tensors] | None = None
        self._dropped = set[str]()

    def states(self, parts: Sequence[Part]) -> list[State]:
        """Return what each part continues from."""
        if self.ranks is None:
            return list(self._state["parts"])
        pairs = zip(parts, self._state["parts"], strict=True)
        shared = [share(part, saved) for part, saved in pairs]
        self._dropped.update(*[dropped for _, dropped in shared])
        return [state for state, _ in shared]

    def complete(self, run: Run) -> None:
        """Raise unless the model has the checkpoint's weights. If files were reassigned, replace them."""
        comm = run._comm
        if self._unseen is not None:
            agreement.check_weights(self._unseen, run.model, comm)
        if self.ranks is None:
            return
        weights = self.weights
        if weights is None:  # each worker of the checkpoint counts once
            first = self.ranks.index(self.ranks[comm.rank]) == comm.rank
            weights = [list_tensors(run.model)] if first else []
        start = share_consensus(run.model, run.parts, weights, comm)
        if comm.rank == 0:
            dropped = f"; dropped: {', '.join(sorted(self._dropped))}" if self._dropped else ""
            logger.warning(
                "%r continues a checkpoint of %s with %d, after step %d: its weights are %s%s.",
                run, _count(self._state["workers"]), comm.size, run.steps, start, dropped,
            )  # fmt: skip


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable weights and the floating buffers, by name."""
    buffers = Buffers(model, "average").averaged()
    return {name: local(tensor) for name, tensor in {**trainable(model), **buffers}.items()}


@torch.no_grad()
def share_consensus(
    model: nn.Module, parts: Sequence[Part], weights: Sequence[Tensors], comm: Communicator
) -> str:
    """Give all workers the consensus, and return its description.

    It is the anchor where a part shows one, and otherwise the mean over all `weights` of all workers; equal
    ones keep every bit. Integer buffers become those of rank 0.
    """
    shown = {name: value.clone() for part in parts for name, value in part.shown().items()}
    agreement.write(model, shown)
    live = {name: tensor for name, tensor in list_tensors(model).items() if name not in shown}
    own = [[those[name].to(live[name].device) for name in live] for those in weights]
    sums = {agreement.checksum(tensors) for tensors in (list(live.values()), *own)}
    answers = comm.tell([sums.pop(), int(bool(sums)), len(own)]).wait()
    number = sum(words[2] for words in answers)
    if len({words[0] for words in answers}) > 1 or any(words[1] for words in answers):
        mean, one = Packed.like(live), Packed.like(live)
        for tensors in own:
            one.read(tensors)
            torch._foreach_add_(mean.flats, one.flats)
        comm.total(mean.flats).wait()
        mean.scale(1 / number)
        mean.write(list(live.values()))
    counts = [b for name, b in Buffers(model, "follow").followed().items() if name not in live]
    if counts:
        agreement.run_collective(counts, comm.broadcast)
    for part in parts:  # those with an anchor of their own
        part.follow(Landing(trainable(model), sys.maxsize))
    means = f"the mean of {_count(number)}"
    return (
        means
        if not shown
        else "the anchor"
        if shown.keys() >= trainable(model).keys()
        else f"the anchor and {means}"
    )
