"""What a collective puts on the links, by how it is carried out."""

from __future__ import annotations

import itertools
import math
from typing import get_args

from offbeat.comm.collective import COLLECTIVES, Algorithm, Crossing
from offbeat.comm.metered import traffic

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
KINDS = tuple(COLLECTIVES)


def own_bytes(algorithm: Algorithm, kind: str, size: int, given: int) -> int:
    """Bytes each of `size` workers sends over its own link, and receives, for `given` bytes.

    A tree sends everything up and everything down, where a ring keeps the own share.
    """
    both_ways = COLLECTIVES[kind].ways == 2
    return 2 * given if algorithm == "tree" and both_ways and size > 1 else traffic(kind, size, given)


def uplink_bytes(
    algorithm: Algorithm, kind: str, size: int, given: int, *, inside: int, groups: int
) -> float:
    """Bytes over the uplink of a group that `inside` of the `size` workers share, in the busier direction.

    The workers come from `groups` groups. A ring in the order of ranks enters and leaves a group once, a
    direct exchange sends from each worker in it to each outside; the ideal is to reduce inside first.
    """
    return COLLECTIVES[kind].crosses(algorithm, Crossing(given, size, inside, groups))


def hops(algorithm: Algorithm, kind: str, counts: list[int]) -> list[float]:
    """How many times the latency of each level is paid, the workers' own links being the first.

    `counts` are the workers, then on each level the groups that they come from. Round a ring each link adds
    its own latency, twice for a mean; up and down a tree the groups of one level meet before the next.
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
