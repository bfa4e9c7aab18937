"""One collective: what its members gave, and when its result lands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.comm.metered import nbytes
from offbeat.simulate.network import Traffic

Settle = Callable[[list[list[Tensor]]], list[list[Tensor]]]


@dataclass
class Call:
    """One collective: what its members gave, and when its result lands."""

    members: tuple[int, ...]
    given: dict[int, tuple[str, list[Tensor], float]] = field(default_factory=dict)
    results: list[list[Tensor]] = field(default_factory=list)
    lands: float = 0.0
    error: str | None = None
    missing: set[int] = field(init=False)  # who has not given yet

    def __post_init__(self) -> None:
        self.missing = set(self.members)

    @property
    def complete(self) -> bool:
        return not self.missing

    def post(self, rank: int, kind: str, tensors: list[Tensor], when: float) -> None:
        self.given[rank] = (kind, tensors, when)
        self.missing.discard(rank)

    def resolve(self, resolve: Settle, traffic: Traffic, *, queue: bool) -> None:
        said = {rank: describe(*self.given[rank][:2]) for rank in self.members}
        first = self.members[0]
        for rank in self.members:
            if said[rank] != said[first]:
                self.error = f"Workers disagree: rank {first} sends {said[first]}, rank {rank} {said[rank]}."
                return
        with torch.no_grad():
            self.results = resolve([self.given[rank][1] for rank in self.members])
        kind, tensors, _ = self.given[first]
        ready = max(when for _, _, when in self.given.values())
        self.lands = traffic.carry(kind, self.members, nbytes(tensors), ready, queue=queue)


def describe(kind: str, tensors: list[Tensor]) -> str:
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
    return f"{kind} of {shapes}"
