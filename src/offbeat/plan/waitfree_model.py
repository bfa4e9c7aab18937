"""Timing model of wait-free rounds: the first worker to arrive starts one; late workers find it finished."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from offbeat.base.draws import whole
from offbeat.base.packed import Packed
from offbeat.comm.collective import nbytes
from offbeat.engine.part import Part
from offbeat.plan.fit import Size
from offbeat.plan.groups import Groups
from offbeat.plan.job import Job
from offbeat.plan.recording import RecordingComm
from offbeat.simulate import Compute
from offbeat.waitfree import EagerGradients
from offbeat.waitfree.base import REMEMBERED, Waitfree, allowance

_CYCLE = 8  # rounds with groups of their own


class NullPart(Part):
    """Replaces a part that is modelled, not recorded."""

    def __init__(self, part: Part) -> None:
        self.model, self.peers = part.model, part.peers


@dataclass(frozen=True)
class WaitfreeModel:
    """A part whose rounds, one after every step, are run by sidecars."""

    part: Waitfree
    size: Size  # bytes of a message
    groups: tuple[Groups, ...]

    @classmethod
    def of(cls, part: Waitfree, job: Job, workers: int) -> WaitfreeModel:
        like = part.live.like()
        sent = nbytes(Packed.like(like).flats) / sum(t.numel() for t in like.values()) * job.parameters
        groups = []
        for round in range(min(part.among.cycle, _CYCLE)):
            comm = part.peers.at(round)
            assert isinstance(comm, RecordingComm)
            groups.append(Groups.of(workers, comm.groups))
        return cls(part, Size(sent), tuple(groups))

    def among(self, round: int) -> Groups:
        return self.groups[round % len(self.groups)]

    def blocking(self, round: int) -> bool:
        return self.part.blocking(round)

    def held(self, round: int) -> bool:
        """Whether sidecars send anything in a round."""
        return self.part.active and (self.part.sidecars or not self.blocking(round))

    def patience(self, awake: Tensor, resumed: Tensor, compute: Compute) -> Tensor:
        """Until when sidecars called at `awake` wait for workers whose step began at `resumed`."""
        if self.part.grace is not None:
            return awake + self.part.grace
        overdue = resumed + _allowances(compute, resumed.shape[-1])
        return torch.where(resumed <= awake, torch.maximum(awake, overdue), awake)

    def initiator(self, round: int) -> int | None:
        """The worker whose arrival starts the round; None for the first to arrive."""
        if isinstance(self.part, EagerGradients) and self.part.activation == "majority":
            return whole(self.part.seed, round, "initiator") % self.part.peers.everyone.size
        return None


@lru_cache
def _allowances(compute: Compute, workers: int) -> Tensor:
    """How long a step of each worker may take before it is overdue."""
    times = compute.seconds(torch.arange(workers)[:, None], torch.arange(REMEMBERED)[None, :])
    return torch.tensor([allowance(row) for row in times.tolist()], dtype=torch.float64)
