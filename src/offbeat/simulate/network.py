"""How long messages take in virtual seconds: links, uplinks that groups of workers share, and latencies."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

from offbeat.base.checks import is_whole
from offbeat.base.errors import BadArgument
from offbeat.comm.collective import COLLECTIVES, Algorithm, Crossing
from offbeat.simulate.compute import require

_ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
LinkId = tuple[int, int]  # the level, 0 for the workers' own links, and the worker or group


@dataclass(frozen=True)
class Level:
    """Groups of `workers` consecutive ranks, such as a node or a region, that share one uplink each.

    `bandwidth` is in bytes per second each way, `latency` the seconds from one group to another.
    """

    workers: int
    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        require(is_whole(self.workers, 1), self, "workers", "must be a whole number, at least 1")
        require(self.latency >= 0, self, "latency", "must not be negative")
        require(self.bandwidth > 0, self, "bandwidth", "must be positive")


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
        require(self.latency >= 0, self, "latency", "must not be negative")
        positive = bool(self.links) and all(bandwidth > 0 for bandwidth in self.links)
        require(positive, self, "bandwidth", "must be positive")
        known, kinds = (", ".join(map(repr, names)) for names in (_ALGORITHMS, COLLECTIVES))
        require(self.reduce in _ALGORITHMS, self, "reduce", f"must be one of {known}")
        rule = f"are pairs of one of {kinds} and a number above 0 and at most 1"
        for kind, share in self.shares:
            require(kind in COLLECTIVES and 0 < share <= 1, self, "shares", rule)
        for inner, outer in itertools.pairwise(self.levels):
            if outer.workers % inner.workers or outer.workers <= inner.workers:
                reason = f"groups of {outer.workers} must be made of whole groups of {inner.workers}."
                raise BadArgument("levels", self.levels, reason, call=self)

    def __repr__(self) -> str:
        rest = [f for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        more = "".join(f", {f.name}={getattr(self, f.name)!r}" for f in rest)
        return f"Network(latency={self.latency}, bandwidth={self.bandwidth}{more})"

    @property
    def links(self) -> tuple[float, ...]:
        """The bandwidths of the workers' own links: one for all, or one for each."""
        return self.bandwidth if isinstance(self.bandwidth, tuple) else (self.bandwidth,)

    def check(self, workers: int) -> None:
        """Raise unless there is a link for each worker."""
        if len(self.links) not in (1, workers):
            reason = f"it has {len(self.links)} links for {workers} workers."
            raise BadArgument("workers", workers, reason, call=self)

    def share(self, kind: str) -> float:
        """The fraction of the workers' own bandwidth that a collective reaches."""
        return dict(self.shares).get(kind, 1.0)

    def seconds(self, nbytes: int) -> float:
        """Return the time of one message between neighbours, on the slowest of the workers' own links."""
        return self.latency + nbytes / min(self.links)

    def delay(self, kind: str, counts: list[int]) -> float:
        """Return the sum of the latencies of one collective. `hops` explains `counts`."""
        latencies = [self.latency, *(level.latency for level in self.levels)]
        if counts[0] == 1 or not any(latencies):
            return 0.0
        paid = hops(self.reduce, kind, counts)
        return sum(times * latency for times, latency in zip(paid, latencies, strict=True) if times)


class Traffic:
    """The state of a network: each link is a queue."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._free: dict[LinkId, float] = {}

    def carry(self, kind: str, members: Sequence[int], given: int, ready: float, *, queue: bool) -> float:
        """Return when a collective lands that is `ready` at this time. It starts when its links are free."""
        if len(members) == 1:
            return ready
        busy, start = self._busy(kind, members, given), ready
        if queue:
            start = max([ready, *(self._free.get(link, 0.0) for link in busy)])
            for link, seconds in busy.items():
                self._free[link] = start + seconds
        groups = [len({rank // level.workers for rank in members}) for level in self.network.levels]
        delay = self.network.delay(kind, [len(members), *groups])
        return start + max(busy.values(), default=0.0) + delay

    def _busy(self, kind: str, members: Sequence[int], given: int) -> dict[LinkId, float]:
        """Return the seconds for which a collective uses each link. Unlimited links are left out."""
        network, size = self.network, len(members)
        sent = own_bytes(network.reduce, kind, size, given) / network.share(kind)
        links = network.links if len(network.links) > 1 else network.links * (max(members) + 1)
        busy = {(0, rank): sent / links[rank] for rank in members if links[rank] < math.inf}
        for number, level in enumerate(network.levels, start=1):
            inside = Counter(rank // level.workers for rank in members)
            if len(inside) == 1 or level.bandwidth == math.inf:
                continue
            for group, count in inside.items():
                crossing = Crossing(given, size, count, len(inside))
                busy[number, group] = COLLECTIVES[kind].crosses(network.reduce, crossing) / level.bandwidth
        return busy


def own_bytes(algorithm: Algorithm, kind: str, size: int, given: int) -> int:
    """Return the bytes that each worker sends over its own link, and receives."""
    up_and_down = algorithm == "tree" and COLLECTIVES[kind].ways == 2 and size > 1
    return 2 * given if up_and_down else COLLECTIVES[kind].sent(size, given)


def hops(algorithm: Algorithm, kind: str, counts: list[int]) -> list[float]:
    """Return how often a collective pays the latency of each level, from the workers' own links outward.
    `counts` are the workers, then the groups that they come from on each level. In a ring each link adds its
    latency, twice for a mean. In a tree the groups of one level meet before those of the next."""
    ways, local, size = COLLECTIVES[kind].ways, COLLECTIVES[kind].local, counts[0]
    if algorithm == "ring" and not local:
        crossing = [count if count > 1 else 0 for count in [*counts, 1]]
        edges = [below - above for below, above in itertools.pairwise(crossing)]
        return [ways * (size - 1) / size * count for count in edges]
    if algorithm == "tree" and not local:
        fans = [below / above for below, above in zip(counts, [*counts[1:], 1], strict=True)]
        return [float(ways * math.ceil(math.log2(fan))) for fan in fans]
    top = max((level for level, count in enumerate(counts) if count > 1), default=0)
    once = 1.0 if algorithm == "ideal" else float(ways)
    return [once if level == top else 0.0 for level in range(len(counts))]
