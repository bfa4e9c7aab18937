"""The groups of a round, and the seconds of its messages, for all groups at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offbeat.comm.collective import COLLECTIVES, Crossing
from offbeat.plan.recording import Size
from offbeat.simulate import Network
from offbeat.simulate.network import own_bytes


@dataclass(frozen=True, eq=False)
class Groups:
    """All workers in one group (`members` is None), or the members of each, padded with the first."""

    workers: int
    members: Tensor | None = None

    @classmethod
    def of(cls, workers: int, groups: list[list[int]] | None) -> "Groups":
        if groups is None or len(groups) == 1:
            return cls(workers)
        longest = max(map(len, groups))
        return cls(workers, torch.tensor([group + group[:1] * (longest - len(group)) for group in groups]))

    @cached_property
    def number(self) -> Tensor:
        """The group of each worker."""
        number = torch.zeros(self.workers, dtype=torch.int64)
        if self.members is not None:
            number[self.members] = torch.arange(len(self.members))[:, None].expand_as(self.members)
        return number

    @cached_property
    def sizes(self) -> Tensor:
        """The workers of each group."""
        return torch.bincount(self.number)

    @cached_property
    def _in_order(self) -> bool:
        """Whether the groups are consecutive ranks, equally many each."""
        return self.members is not None and torch.equal(self.members.flatten(), torch.arange(self.workers))

    def latest(self, times: Tensor) -> Tensor:
        """The maximum over each worker's group, for every worker."""
        if times.shape[-1] == 1:
            return times  # the same for every worker
        if self.members is None:
            return times.amax(-1, keepdim=True)
        shape = self.members.shape
        if self._in_order:
            most = times.reshape(*times.shape[:-1], *shape).amax(-1, keepdim=True)
            return most.expand(*most.shape[:-1], shape[1]).flatten(-2)
        ordered = times.index_select(-1, self.members.flatten())
        return ordered.reshape(*times.shape[:-1], *shape).amax(-1).index_select(-1, self.number)


class MessageCosts:
    """The seconds of messages, cached by kind, size and groups: [network, 1, worker]. The networks differ
    only in bandwidth. If all workers are `alike`, one stands for all."""

    def __init__(self, networks: Sequence[Network], *, alike: bool) -> None:
        self.networks, self._alike, self._known = networks, alike, dict[object, tuple[Tensor, Tensor]]()
        seconds = [network.seconds(8) for network in networks]
        self.announcement = torch.tensor(seconds, dtype=torch.float64)[:, None, None]  # of a word to all

    def of(self, kind: str, size: Size, groups: Groups) -> tuple[Tensor, Tensor]:
        """Return the seconds for which links are busy, and the latency after; the worst if all are alike."""
        key = (kind, size, None if groups.members is None else groups)
        if key not in self._known:
            seconds = self._work_out(kind, size, groups)
            if self._alike:
                seconds = seconds.amax(-1, keepdim=True)
            elif groups.members is not None:
                seconds = seconds[..., groups.number]
            self._known[key] = seconds[0, :, None], seconds[1, :, None]
        return self._known[key]

    def _work_out(self, kind: str, size: Size, groups: Groups) -> Tensor:
        """Return both for each group: [2, network, group]. All groups send at once and share uplinks."""
        network, sizes = self.networks[0], groups.sizes
        given = {n: size.at(n) for n in set(sizes.tolist())}
        sent = _each([sizes], lambda n: own_bytes(network.reduce, kind, n, given[n]) if n > 1 else 0)
        busy = [sent / network.share(kind) / _slowest(n, groups) for n in self.networks]
        counts = [sizes]

        def load(size: int, inside: int, count: int) -> float:
            crossing = Crossing(given[size], size, inside, count)
            return COLLECTIVES[kind].crosses(network.reduce, crossing) if count > 1 else 0.0

        for depth, level in enumerate(network.levels):
            uplinks = -(-groups.workers // level.workers)
            used = groups.number * uplinks + torch.arange(groups.workers) // level.workers
            pairs, inside = torch.unique(used, return_counts=True)
            owner, uplink = pairs // uplinks, pairs % uplinks
            spanned = torch.bincount(owner)  # the number of uplinks behind which each group has members
            counts.append(spanned)
            loads = _each([sizes[owner], inside, spanned[owner]], load)
            total = torch.zeros(uplinks, dtype=torch.float64).index_add_(0, uplink, loads)
            most = torch.where(loads > 0, total[uplink], 0.0)
            worst = torch.zeros(len(sizes), dtype=torch.float64).scatter_reduce_(0, owner, most, "amax")
            limits = [n.levels[depth].bandwidth for n in self.networks]
            busy = [torch.maximum(b, worst / limit) for b, limit in zip(busy, limits, strict=True)]
        delay = _each(counts, lambda *counts: network.delay(kind, list(counts)))
        return torch.stack([torch.stack(busy), delay.expand(len(busy), -1)])


def _slowest(network: Network, groups: Groups) -> Tensor:
    """Return the bandwidth of the slowest link of each group."""
    links = torch.tensor(network.links, dtype=torch.float64)
    if len(links) == 1:
        return links
    most = torch.full((len(groups.sizes),), math.inf, dtype=torch.float64)
    return most.scatter_reduce_(0, groups.number, links, "amin")


def _each(columns: Sequence[Tensor], value: Callable[..., float]) -> Tensor:
    """Map a function over rows of whole numbers, once per distinct row."""
    key = torch.zeros_like(columns[0])
    for column in columns:
        key = key * (int(column.max()) + 1) + column  # a single column sorts faster than rows
    found, which = torch.unique(key, return_inverse=True)
    first = torch.empty_like(found).scatter_(0, which, torch.arange(len(key)))
    rows = torch.stack([column[first] for column in columns], 1).tolist()
    return torch.tensor([value(*row) for row in rows], dtype=torch.float64)[which]
