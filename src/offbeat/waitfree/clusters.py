"""Which parts of the data each worker computes, and how some answers give the sum over all parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from offbeat.base.checks import is_whole
from offbeat.base.errors import BadArgument
from offbeat.waitfree.cyclic import cyclic, find_coefficients


@dataclass(frozen=True)
class Clusters:
    """The ranks of each cluster. A cluster has as many parts of the data as workers.

    A worker computes `stragglers` + 1 parts of its cluster and answers with one vector: the sum of their
    gradients, times coefficients. In a cluster of `stragglers` + 1 workers all compute all of its parts, so
    one answer is enough, and coefficients are 1 (fractional repetition). A larger cluster has a cyclic code,
    and all but `stragglers` of its answers are enough.
    """

    ranks: tuple[tuple[int, ...], ...]
    stragglers: int
    _place: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)  # cluster, seat

    def __post_init__(self) -> None:
        seats = {rank: (c, i) for c, ranks in enumerate(self.ranks) for i, rank in enumerate(ranks)}
        object.__setattr__(self, "_place", seats)

    @classmethod
    def form(cls, workers: int, stragglers: int, clusters: int | None) -> Clusters:
        """Form clusters of consecutive ranks. With None, they are as small as possible."""
        if workers == 1 and is_whole(stragglers, 0):
            stragglers = 0  # a worker alone computes every part once
        if not is_whole(stragglers, 0) or stragglers >= workers:
            rule = f"must be a whole number from 0 to {workers - 1}, since there are {workers} workers."
            raise BadArgument("stragglers", stragglers, f"stragglers {rule}")
        load = stragglers + 1
        if clusters is None:
            sizes = [load] * (workers // load)
            sizes[-1] += workers % load
        else:
            if not is_whole(clusters, 1) or workers % clusters or workers // clusters < load:
                rule = f"it must divide the {workers} workers into equal clusters of {load} or more."
                raise BadArgument("clusters", clusters, rule)
            size = workers // clusters
            size = load if size % load == 0 else size
            sizes = [size] * (workers // size)
        for size in set(sizes) - {load}:
            if cyclic(size, stragglers) is None:
                rule = f"a cyclic code of {size} workers would need coefficients above 10: use clusters of "
                raise BadArgument("stragglers", stragglers, f"{rule}{load} workers, or of another size.")
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(tuple(tuple(range(b - n, b)) for n, b in zip(sizes, ends, strict=True)), stragglers)

    def parts(self, rank: int) -> list[tuple[int, float]]:
        """Return the numbers of a worker's parts, and the coefficient of each."""
        cluster, seat = self._place[rank]
        first, size = sum(map(len, self.ranks[:cluster])), len(self.ranks[cluster])
        if size == self.stragglers + 1:
            return [(first + i, 1.0) for i in range(size)]
        matrix = cyclic(size, self.stragglers)
        assert matrix is not None
        seats = [(seat + i) % size for i in range(self.stragglers + 1)]
        return [(first + i, float(matrix[seat, i])) for i in seats]

    def enough(self, answered: Collection[int]) -> bool:
        """Whether the answers of these ranks give the sum of all parts."""
        missing = [sum(rank not in answered for rank in ranks) for ranks in self.ranks]
        return max(missing) <= self.stragglers

    def weigh(self, answered: Collection[int]) -> dict[int, float]:
        """Return the factors with which answers add up to the sum of all parts. Some may not be needed."""
        factors: dict[int, float] = {}
        for ranks in self.ranks:
            there = [rank for rank in ranks if rank in answered]
            if len(ranks) == self.stragglers + 1:
                factors[there[0]] = 1.0
            else:
                solved = _solve(len(ranks), self.stragglers, tuple(map(ranks.index, there)))
                factors.update(zip(there, solved, strict=True))
        return factors

    def seat(self, ranks: Sequence[int]) -> Clusters:
        """Return clusters of the same sizes, filled with these ranks in order."""
        seats = iter(ranks)
        return replace(self, ranks=tuple(tuple(islice(seats, len(cluster))) for cluster in self.ranks))

    def reform(self, late: Collection[int]) -> Clusters:
        """Spread late workers evenly over the clusters, moving as few workers as possible."""
        ranks = [list(cluster) for cluster in self.ranks]

        def count(cluster: list[int]) -> int:
            return sum(rank in late for rank in cluster)

        while True:
            most, least = max(ranks, key=count), min(ranks, key=count)
            if count(most) - count(least) < 2:
                return replace(self, ranks=tuple(map(tuple, ranks)))
            i = next(i for i, rank in enumerate(most) if rank in late)
            j = next(j for j, rank in enumerate(least) if rank not in late)
            most[i], least[j] = least[j], most[i]


@lru_cache(maxsize=4096)
def _solve(size: int, stragglers: int, seats: tuple[int, ...]) -> tuple[float, ...]:
    matrix = cyclic(size, stragglers)
    assert matrix is not None
    return tuple(find_coefficients(matrix[list(seats)]).tolist())
