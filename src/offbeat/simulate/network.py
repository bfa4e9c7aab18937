"""How long messages take in virtual seconds: links, uplinks shared by groups of workers, and latencies."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.base.checks import is_whole
from offbeat.base.errors import BadArgument
from offbeat.comm.collective import Algorithm
from offbeat.simulate.collective import ALGORITHMS, KINDS, hops, own_bytes, uplink_bytes

Link = tuple[int, int]
"""A level, 0 for the workers' own links, and the worker or group it belongs to."""


@dataclass(frozen=True)
class Level:
    """Groups of `workers` consecutive ranks, such as a node or a region, that share one uplink each.

    `bandwidth` is in bytes per second each way, `latency` the seconds from one group to another.
    """

    workers: int
    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not is_whole(self.workers, 1):
            raise BadArgument(
                "workers", self.workers, "workers must be a whole number, at least 1.", call=self
            )
        _check(self, self.latency, (self.bandwidth,))


@dataclass(frozen=True)
class Network:
    """Full-duplex links of `bandwidth` bytes per second each way, on which messages queue.

    `bandwidth` is that of every worker's own link, or a tuple with one for each. `levels` are the groups that
    share uplinks, from the innermost: `(Level(8, ...), Level(64, ...))` means nodes of 8 in regions of 64.
    `reduce` is the algorithm of collectives: "ring", "tree", "direct" (each worker with every other), or
    "ideal" (as few bytes as possible and one latency). `shares` are the fractions of the bandwidth that some
    collectives reach, such as `(("exchange", 0.7),)` where ports overflow when all send to all. Control
    messages, of a few bytes, do not queue.

        Network(latency=0.02, bandwidth=12.5e6)
        Network(1e-5, 25e9, levels=(Level(8, bandwidth=12.5e9), Level(512, bandwidth=1.25e9, latency=0.03)))
    """

    latency: float = 0.0
    bandwidth: float | tuple[float, ...] = math.inf
    reduce: Algorithm = "ideal"
    levels: tuple[Level, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        _check(self, self.latency, self.links)
        if self.reduce not in ALGORITHMS:
            known = ", ".join(map(repr, ALGORITHMS))
            raise BadArgument("reduce", self.reduce, f"reduce must be one of {known}.", call=self)
        for kind, share in self.shares:
            if kind not in KINDS or not 0 < share <= 1:
                raise ValueError(
                    f"{self!r}: shares are pairs of one of {', '.join(map(repr, KINDS))} and a number "
                    "above 0 and at most 1."
                )
        for inner, outer in itertools.pairwise(self.levels):
            if outer.workers % inner.workers or outer.workers <= inner.workers:
                reason = f"groups of {outer.workers} must be made of whole groups of {inner.workers}."
                raise BadArgument("levels", self.levels, reason, call=self)

    def __repr__(self) -> str:
        reduce = "" if self.reduce == "ideal" else f", reduce={self.reduce!r}"
        levels = f", levels={self.levels!r}" if self.levels else ""
        shares = f", shares={self.shares!r}" if self.shares else ""
        return f"Network(latency={self.latency}, bandwidth={self.bandwidth}{reduce}{levels}{shares})"

    @property
    def links(self) -> tuple[float, ...]:
        """The bandwidths of the workers' own links: one for all, or one for each."""
        return self.bandwidth if isinstance(self.bandwidth, tuple) else (self.bandwidth,)

    def check(self, workers: int) -> None:
        """Raise unless there is a link for each worker."""
        if len(self.links) not in (1, workers):
            raise BadArgument(
                "workers", workers, f"it has {len(self.links)} links for {workers} workers.", call=self
            )

    def share(self, kind: str) -> float:
        """The fraction of the workers' own bandwidth that a collective reaches."""
        return dict(self.shares).get(kind, 1.0)

    def link(self, rank: int) -> float:
        return self.links[rank if len(self.links) > 1 else 0]

    def seconds(self, nbytes: int) -> float:
        """The time of one message between neighbours, on the slowest of the workers' own links."""
        return self.latency + nbytes / min(self.links)

    def counts(self, members: Sequence[int]) -> list[int]:
        """The number of members, then of the groups that they come from on each level."""
        return [len(members), *(len({rank // level.workers for rank in members}) for level in self.levels)]

    def delay(self, kind: str, members: Sequence[int]) -> float:
        """The sum of the latencies of one collective."""
        return self.delay_of(kind, self.counts(members))

    def delay_of(self, kind: str, counts: list[int]) -> float:
        """The sum of the latencies of one collective, from `counts` of its members."""
        latencies = [self.latency, *(level.latency for level in self.levels)]
        if counts[0] == 1 or not any(latencies):
            return 0.0
        paid = hops(self.reduce, kind, counts)
        return sum(times * latency for times, latency in zip(paid, latencies, strict=True) if times)

    def busy(self, kind: str, members: Sequence[int], given: int) -> dict[Link, float]:
        """Seconds for which one collective keeps each link busy; links without a limit are left out."""
        size = len(members)
        sent = own_bytes(self.reduce, kind, size, given) / self.share(kind)
        busy = {(0, rank): sent / self.link(rank) for rank in members if self.link(rank) < math.inf}
        for number, level in enumerate(self.levels, start=1):
            inside = Counter(rank // level.workers for rank in members)
            if len(inside) == 1 or level.bandwidth == math.inf:
                continue
            for group, count in inside.items():
                amount = uplink_bytes(self.reduce, kind, size, given, inside=count, groups=len(inside))
                busy[number, group] = amount / level.bandwidth
        return busy


class Traffic:
    """The state of a network: each link is a queue."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._free: dict[Link, float] = {}

    def carry(self, kind: str, members: Sequence[int], given: int, ready: float, *, queue: bool) -> float:
        """The time at which a collective lands whose last member began at `ready`.

        It starts when all its links are free, and holds each for as long as its bytes take there.
        """
        if len(members) == 1:
            return ready
        busy = self.network.busy(kind, members, given)
        start = ready
        if queue:
            start = max([ready, *(self._free.get(link, 0.0) for link in busy)])
            for link, seconds in busy.items():
                self._free[link] = start + seconds
        return start + max(busy.values(), default=0.0) + self.network.delay(kind, members)


def _check(value: Network | Level, latency: float, bandwidths: Sequence[float]) -> None:
    if not latency >= 0:
        raise BadArgument("latency", latency, "latency must not be negative.", call=value)
    if not bandwidths or not all(bandwidth > 0 for bandwidth in bandwidths):
        raise BadArgument("bandwidth", bandwidths, "bandwidth must be positive.", call=value)
