"""The kinds of messages that workers exchange, and what each puts on the network: the one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["ideal", "ring", "tree", "direct"]


@dataclass(frozen=True)
class Crossing:
    """A collective of `size` workers, `inside` of them in a group whose uplink it crosses."""

    given: int  # bytes that each worker hands in
    size: int
    inside: int
    groups: int  # that the workers come from

    @property
    def outside(self) -> int:
        return self.size - self.inside


@dataclass(frozen=True)
class Collective:
    """One kind of message. Its costs are functions of the number of workers, `size`.

    `share` is what one rank sends, per byte it hands in. `hops` counts the messages between neighbours that
    follow each other when gloo runs it. `crosses` is the bytes over a group's uplink, in the busier
    direction, for each algorithm. `ways` is 2 if data go to the others and come back. A `local` one goes to
    a neighbour only, whatever the algorithm.
    """

    name: str
    share: Callable[[int], float]
    hops: Callable[[int], int]
    crosses: Callable[[Algorithm, Crossing], float]
    ways: int = 1
    local: bool = False


def _mean_crosses(algorithm: Algorithm, by: Crossing) -> float:
    """The ideal is to reduce inside each group first."""
    return {
        "ideal": 2 * by.given * (by.groups - 1) / by.groups,
        "ring": 2 * by.given * (by.size - 1) / by.size,
        "tree": 2 * by.given,
        "direct": 2 * by.given * by.inside * by.outside / by.size,
    }[algorithm]


def _gather_crosses(algorithm: Algorithm, by: Crossing) -> float:
    return {
        "ideal": by.given * max(by.inside, by.outside),
        "ring": by.given * (by.size - 1),
        "tree": by.given * max(by.inside, by.outside),
        "direct": by.given * by.inside * by.outside,
    }[algorithm]


def _exchange_crosses(algorithm: Algorithm, by: Crossing) -> float:
    """Every worker has another chunk for every other: nothing can be shared."""
    return by.given * by.inside * by.outside / by.size


def _crosses_once(algorithm: Algorithm, by: Crossing) -> float:
    return by.given


_ALL = (
    # A ring or halving all-reduce sends each byte twice except for the rank's own share.
    Collective(
        "mean",
        share=lambda size: 2 * (size - 1) / size,
        hops=lambda size: 2 * (size - 1),
        crosses=_mean_crosses,
        ways=2,
    ),
    # Each rank sends its own part to all others.
    Collective("gather", share=lambda size: size - 1, hops=lambda size: size - 1, crosses=_gather_crosses),
    # All but the rank's own chunk.
    Collective(
        "exchange", share=lambda size: (size - 1) / size, hops=lambda size: 1, crosses=_exchange_crosses
    ),
    # Down a tree; the share is the average over the ranks.
    Collective(
        "broadcast",
        share=lambda size: (size - 1) / size,
        hops=lambda size: (size - 1).bit_length(),
        crosses=_crosses_once,
    ),
    # To the next rank; in the order of ranks, each group's uplink carries one such message.
    Collective(
        "shift",
        share=lambda size: 1 if size > 1 else 0,
        hops=lambda size: 1,
        crosses=_crosses_once,
        local=True,
    ),
)
COLLECTIVES = {collective.name: collective for collective in _ALL}
