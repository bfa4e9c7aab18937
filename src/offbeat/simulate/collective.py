"""What a collective puts on the links, for each algorithm."""

from __future__ import annotations

import itertools
import math
from typing import get_args

from offbeat.comm.collective import COLLECTIVES, Algorithm, Crossing

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
KINDS = tuple(COLLECTIVES)


def own_bytes(algorithm: Algorithm, kind: str, size: int, given: int) -> int:
    """Bytes each of `size` workers sends over its own link, and receives, for `given` bytes.

    A tree sends everything up and down; a ring keeps the worker's own share.
    """
    both_ways = COLLECTIVES[kind].ways == 2
    if algorithm == "tree" and both_ways and size > 1:
        return 2 * given
    return COLLECTIVES[kind].sent(size, given)


def uplink_bytes(
    algorithm: Algorithm, kind: str, size: int, given: int, *, inside: int, groups: int
) -> float:
    """Bytes over the uplink of a group that `inside` of the `size` workers share, in the busier direction.

    The workers come from `groups` groups. A ring in rank order enters and leaves a group once. A direct
    exchange sends from each worker inside to each outside. The ideal is to reduce inside first.
    """
    return COLLECTIVES[kind].crosses(algorithm, Crossing(given, size, inside, groups))


def hops(algorithm: Algorithm, kind: str, counts: list[int]) -> list[float]:
    """How often a collective pays the latency of each level; the first level is the workers' own links.

    `counts` are the workers, then the groups that they come from on each level. In a ring each link adds its
    own latency, twice for a mean. In a tree the groups of one level meet before those of the next.
    """
    ways, local = COLLECTIVES[kind].ways, COLLECTIVES[kind].local
    size = counts[0]
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
