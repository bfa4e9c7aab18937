"""The groups of a round, and the seconds of its messages, for all groups at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from offbeat.comm.collective import COLLECTIVES, Crossing
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.plan.recording import RecordingComm
from offbeat.simulate import Network
from offbeat.simulate.network import own_bytes

_ALIKE = 4  # rounds with groups of their own; later rounds reuse them


@dataclass(frozen=True)
class Spans:
    """How many members each group has behind each uplink."""

    owner: Tensor  # a group
    uplink: Tensor  # one of the uplinks behind which it has members
    inside: Tensor  # how many
    spanned: Tensor  # for each group, behind how many uplinks it has some
    uplinks: int

    @classmethod
    def of(cls, number: Tensor, place: Tensor) -> Spans:
        width = int(place.max()) + 1
        pairs, inside = torch.unique(number * width + place, return_counts=True)
        owner = pairs // width
        return cls(owner, pairs % width, inside, torch.bincount(owner), width)


@dataclass(frozen=True)
class Groups:
    """All workers in one group (`members` is None), or the members of each, padded with the first."""

    workers: int
    members: Tensor | None = None
    _spans: dict[int, Spans] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, workers: int, groups: list[list[int]] | None) -> Groups:
        if groups is None or len(groups) == 1:
            return cls(workers)
        longest = max(map(len, groups))
        return cls(workers, torch.tensor([group + group[:1] * (longest - len(group)) for group in groups]))

    @cached_property
    def number(self) -> Tensor:
        """The group of each worker."""
        if self.members is None:
            return torch.zeros(self.workers, dtype=torch.int64)
        number = torch.empty(self.workers, dtype=torch.int64)
        number[self.members] = torch.arange(len(self.members))[:, None].expand_as(self.members)
        return number

    @cached_property
    def sizes(self) -> Tensor:
        """The workers of each group."""
        if self.members is None:
            return torch.tensor([self.workers])
        return torch.bincount(self.number, minlength=len(self.members))

    def latest(self, times: Tensor) -> Tensor:
        """The maximum over each worker's group, for every worker."""
        if self.members is None:
            return times.amax(-1, keepdim=True)
        if times.shape[-1] == 1:
            return times  # the same for every worker
        shape = self.members.shape
        if self._in_order:
            most = times.reshape(*times.shape[:-1], *shape).amax(-1, keepdim=True)
            return most.expand(*most.shape[:-1], shape[1]).flatten(-2)
        ordered = times.index_select(-1, self.members.flatten())
        return ordered.reshape(*times.shape[:-1], *shape).amax(-1).index_select(-1, self.number)

    @cached_property
    def _in_order(self) -> bool:
        """Whether the groups are consecutive ranks, equally many each."""
        return self.members is not None and torch.equal(self.members.flatten(), torch.arange(self.workers))

    def spans(self, width: int) -> Spans:
        """How the groups spread over uplinks of this many workers each."""
        if width not in self._spans:
            self._spans[width] = Spans.of(self.number, torch.arange(self.workers) // width)
        return self._spans[width]

    def spread(self, values: Tensor) -> Tensor:
        """The value of its group for every worker."""
        return values if self.members is None else values[..., self.number]


def alike(round: int) -> int:
    """The round whose groups stand for the groups of this one."""
    return round % _ALIKE


def groups_at(part: Part, round: int, workers: int) -> Groups:
    """The groups of this round of a part."""
    if not isinstance(part, Exchange):
        return Groups(workers)
    comm = part.peers.at(round)
    assert isinstance(comm, RecordingComm)
    return Groups.of(workers, comm.groups)


@dataclass(frozen=True)
class Cost:
    """Seconds for which a message keeps the links of each group busy, and its latency: [network, group]."""

    busy: Tensor
    delay: Tensor


def cost(networks: Sequence[Network], groups: Groups, kind: str, given: dict[int, int]) -> Cost:
    """The cost of a message that all groups send at once; `given` is the bytes by the size of the group.

    The networks differ only in bandwidth. Groups that share an uplink share its bandwidth.
    """
    network, sizes = networks[0], groups.sizes
    sent = _each([sizes], lambda size: own_bytes(network.reduce, kind, size, given[size]) if size > 1 else 0)
    busy = [sent / network.share(kind) / _slowest(n, groups) for n in networks]
    counts = [sizes]
    for number, level in enumerate(network.levels):
        spans = groups.spans(level.workers)
        counts.append(spans.spanned)

        def load(size: int, inside: int, count: int) -> float:
            if count == 1:
                return 0.0
            return COLLECTIVES[kind].crosses(network.reduce, Crossing(given[size], size, inside, count))

        loads = _each([sizes[spans.owner], spans.inside, spans.spanned[spans.owner]], load)
        total = torch.zeros(spans.uplinks, dtype=torch.float64).index_add_(0, spans.uplink, loads)
        most = torch.where(loads > 0, total[spans.uplink], 0.0)
        worst = torch.zeros(len(sizes), dtype=torch.float64).scatter_reduce_(0, spans.owner, most, "amax")
        busy = [
            torch.maximum(b, worst / n.levels[number].bandwidth) for b, n in zip(busy, networks, strict=True)
        ]
    delay = _each(counts, lambda *counts: network.delay(kind, list(counts)))
    return Cost(torch.stack(busy), delay.expand(len(networks), -1))


def _slowest(network: Network, groups: Groups) -> Tensor:
    """The bandwidth of the slowest worker's link in each group."""
    if len(network.links) == 1:
        return torch.tensor(network.links, dtype=torch.float64)
    links = torch.tensor(network.links, dtype=torch.float64)
    return torch.full((len(groups.sizes),), math.inf, dtype=torch.float64).scatter_reduce_(
        0, groups.number, links, "amin"
    )


def _each(columns: Sequence[Tensor], value: Callable[..., float]) -> Tensor:
    """Map a function over rows of whole numbers, once per distinct row."""
    key = torch.zeros_like(columns[0])
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    found, which = torch.unique(key, return_inverse=True)
    first = torch.empty_like(found).scatter_(0, which, torch.arange(len(key)))
    rows = torch.stack([column[first] for column in columns], 1).tolist()
    return torch.tensor([value(*row) for row in rows], dtype=torch.float64)[which]
