"""The table of collectives: what each kind puts on the network, and what each rank gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

Algorithm = Literal["ideal", "ring", "tree", "direct"]
LONG = 2**20  # bytes, for all ranks together; shorter gathers and exchanges are sent to all ranks at once


@dataclass(frozen=True)
class Crossing:
    """A collective of `size` workers, `inside` of them in one group, which crosses the group's uplink."""

    given: int  # bytes that each worker hands in
    size: int
    inside: int
    groups: int  # the number of groups that the workers come from


@dataclass(frozen=True)
class Collective:
    """One kind of collective. Its costs are functions of the number of workers, `size`.

    `sent(size, given)` are the bytes that one rank sends if each hands in `given` bytes, and
    `hops(size, given)` counts the sequential messages between neighbours, both over gloo. `crosses` are the
    bytes over a group's uplink, in the busier direction, for each algorithm. `results(posts, src, ranks)` are
    the results of some ranks, given the tensors of all.
    """

    name: str
    phrase: str  # what a rank waits for, in an error
    sent: Callable[[int, int], int]
    results: Callable[[Sequence[Sequence[Tensor]], int, Sequence[int]], list[list[Tensor]]]
    hops: Callable[[int, int], int] = lambda size, given: 1
    crosses: Callable[[Algorithm, Crossing], float] = lambda algorithm, by: by.given
    ways: int = 1  # 2: data goes to the others and comes back
    local: bool = False  # data goes to a neighbour only, whatever the algorithm
    in_place: bool = False  # results replace the tensors that were handed in

    def deliver(self, given: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        """Put one rank's results where they belong."""
        if not self.in_place:
            return results
        with torch.no_grad():
            for tensor, result in zip(given, results, strict=True):
                tensor.copy_(result)
        return given


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(attrgetter("nbytes"), tensors))


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum, added from the first to the last."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


# Adds tensor by tensor, in rank order; `Communicator.mean` divides afterwards. A ring or halving all-reduce
# sends each byte twice except for the rank's own share.
SUM = Collective(
    "mean",
    phrase="the mean of {bytes:,} bytes",
    sent=lambda size, given: round(given * (2 * (size - 1) / size)),
    hops=lambda size, given: 2 * (size - 1),
    crosses=lambda algorithm, by: {
        "ideal": 2 * by.given * (by.groups - 1) / by.groups,  # each group is reduced inside first
        "ring": 2 * by.given * (by.size - 1) / by.size,
        "tree": 2 * by.given,
        "direct": 2 * by.given * by.inside * (by.size - by.inside) / by.size,
    }[algorithm],
    results=lambda posts, src, ranks: [[sum_in_order(p) for p in zip(*posts, strict=True)]] * len(ranks),
    ways=2,
    in_place=True,
)
# Each rank sends its tensor to all others: along a ring, if it is long.
GATHER = Collective(
    "gather",
    phrase="a gather of {bytes:,} bytes",
    sent=lambda size, given: round(given * (size - 1)),
    hops=lambda size, given: 1 if size * given < LONG else size - 1,
    crosses=lambda algorithm, by: {
        "ideal": by.given * max(by.inside, by.size - by.inside),
        "ring": by.given * (by.size - 1),
        "tree": by.given * max(by.inside, by.size - by.inside),
        "direct": by.given * by.inside * (by.size - by.inside),
    }[algorithm],
    results=lambda posts, src, ranks: [[post[0].clone() for post in posts] for _ in ranks],
)
# Each rank has a different chunk for every rank, so nothing can be shared; its own chunk stays.
EXCHANGE = Collective(
    "exchange",
    phrase="an exchange of {bytes:,} bytes",
    sent=lambda size, given: round(given * ((size - 1) / size)),
    crosses=lambda algorithm, by: by.given * by.inside * (by.size - by.inside) / by.size,
    results=lambda posts, src, ranks: [[post[rank].clone() for post in posts] for rank in ranks],
)
# Down a tree; `sent` is the average over the ranks.
BROADCAST = Collective(
    "broadcast",
    phrase="rank {src}'s {bytes:,} bytes",
    sent=lambda size, given: round(given * ((size - 1) / size)),
    hops=lambda size, given: (size - 1).bit_length(),
    results=lambda posts, src, ranks: [[tensor.clone() for tensor in posts[src]]] * len(ranks),
    in_place=True,
)
# To the next rank. In the order of ranks, each group's uplink carries one such message.
SHIFT = Collective(
    "shift",
    phrase="the previous rank's {bytes:,} bytes",
    sent=lambda size, given: round(given) if size > 1 else 0,
    results=lambda posts, src, ranks: [[posts[rank - 1][0].clone()] for rank in ranks],
    local=True,
)
COLLECTIVES = {kind.name: kind for kind in (SUM, GATHER, EXCHANGE, BROADCAST, SHIFT)}


def traffic(kind: str, size: int, given: int) -> int:
    """Return the bytes that one of `size` ranks sends if each hands in `given` bytes."""
    return COLLECTIVES[kind].sent(size, given)
