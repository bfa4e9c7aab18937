"""Who takes part in a round: all workers, random pairs, fixed groups, or groups that mix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offbeat.base.checks import is_whole
from offbeat.base.draws import draw_order
from offbeat.comm.changing import Changing, refusal
from offbeat.comm.communicator import Communicator
from offbeat.comm.solo import Solo
from offbeat.comm.torch_backend import Torch

Group = Communicator | dist.ProcessGroup | DeviceMesh | None

_communicators: WeakKeyDictionary[dist.ProcessGroup, Torch] = WeakKeyDictionary()
_PARTITIONS = 16  # of random groups, if a size is not a power of two; each keeps its connections


def communicator(group: Group = None) -> Communicator:
    """Return the communicator of a group. None means the default process group, or else a single worker.

    There is one per group. After a run has failed, the next run on the group gets a new one.
    """
    if isinstance(group, Communicator):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group={group}: the mesh must have one axis, not {group.ndim}: pass mesh['replica']."
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Solo()
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: group must be a ProcessGroup, a one-axis DeviceMesh or a Communicator."
        )
    if (known := _communicators.get(group)) is None or known.left:
        known = _communicators[group] = Torch(group)
    return known


class Peers(Protocol):
    """Who takes part in a round."""

    @property
    def everyone(self) -> Communicator:
        """All workers that share the model."""

    @property
    def fixed(self) -> bool:
        """Whether the groups are the same in every round."""

    def at(self, round: int) -> Communicator:
        """Return this worker's group in a round. It depends on the round's number alone."""


class _Grouped:
    group: Group

    @cached_property
    def everyone(self) -> Communicator:
        return communicator(self.group)


@dataclass(frozen=True)
class World(_Grouped):
    """All workers, in every round."""

    group: Group = field(default=None, repr=False)
    fixed = True
    cycle = 1  # the number of rounds after which the groups repeat

    def at(self, round: int) -> Communicator:
        return self.everyone


@dataclass(frozen=True)
class Pairs(_Grouped):
    """Random pairs, drawn from `seed` and the round. If the number of workers is odd, one stays alone."""

    group: Group = field(default=None, repr=False)
    seed: int = 0

    @property
    def fixed(self) -> bool:
        return self.everyone.size <= 2

    def at(self, round: int) -> Communicator:
        order = draw_order(self.everyone.size, self.seed, round, "pairs")
        return self.everyone.split([sorted(order[i : i + 2]) for i in range(0, len(order), 2)])


@dataclass(frozen=True)
class Subgroups(_Grouped):
    """Fixed groups of `ranks` consecutive ranks each, or a list of the ranks of each group."""

    ranks: int | Sequence[Sequence[int]]
    group: Group = None
    fixed = True

    def __post_init__(self) -> None:
        if isinstance(self.everyone, Changing):
            raise refusal(self.everyone, f"{self!r} needs the same workers all the time")
        _ = self._groups  # raises if the ranks do not divide into groups

    def at(self, round: int) -> Communicator:
        return self.everyone.split(self._groups)

    def __repr__(self) -> str:
        return f"Subgroups({self.ranks!r})"

    @cached_property
    def _groups(self) -> list[list[int]]:
        size, ranks = self.everyone.size, self.ranks
        if isinstance(ranks, int):
            if ranks < 1 or size % ranks:
                raise ValueError(
                    f"{self!r}: {size} workers do not divide into groups of {ranks}; for uneven groups, list "
                    "the ranks of each."
                )
            return [list(range(start, start + ranks)) for start in range(0, size, ranks)]
        lists = isinstance(ranks, Sequence) and all(isinstance(group, list | tuple) for group in ranks)
        if not lists or not all(isinstance(rank, int) for group in ranks for rank in group):
            raise TypeError(f"{self!r}: pass the number of ranks per group, or the ranks of each group.")
        if sorted(itertools.chain(*ranks)) != list(range(size)):
            raise ValueError(f"{self!r}: each of the ranks 0 to {size - 1} must be in exactly one group.")
        return [list(group) for group in ranks]


@dataclass(frozen=True)
class Butterfly(_Grouped):
    """Groups of `group_size` that change every round, so that a few rounds mix all workers.

    If K and S are powers of two, workers p and q are together in round t if p XOR q has ones only among the
    log₂ S bits that begin at (t·log₂ S) mod log₂ K, wrapping around: log₂ K / log₂ S rounds at rate 0 give
    the mean of all. Otherwise a random order of the workers, drawn from `seed` and the round, is cut into
    nearly equal groups. S defaults to 2^⌈log₂ K / 2⌉. Larger groups mix faster, in longer rounds.
    """

    group_size: int | None = None
    group: Group = None
    seed: int = 0

    def __post_init__(self) -> None:
        size = self.group_size
        if size is not None and not is_whole(size, 1):
            raise ValueError(f"group_size={size!r}: group_size must be a whole number, at least 1.")

    @cached_property
    def size(self) -> int:
        """The largest number of workers in a group."""
        workers = self.everyone.size
        wanted = 2 ** math.ceil(math.log2(workers) / 2) if self.group_size is None else self.group_size
        return min(wanted, workers)

    @cached_property
    def cycle(self) -> int:
        """The number of rounds after which the groups repeat."""
        if self.size in (1, self.everyone.size):
            return 1
        return self._bits[0] // math.gcd(*self._bits) if self._bits else _PARTITIONS

    @property
    def fixed(self) -> bool:
        return self.cycle == 1

    @cached_property
    def _bits(self) -> tuple[int, int] | None:
        """log₂ K and log₂ S; None unless both are whole."""
        bits, width = self.everyone.size.bit_length() - 1, self.size.bit_length() - 1
        return (bits, width) if (2**bits, 2**width) == (self.everyone.size, self.size) else None

    def at(self, round: int) -> Communicator:
        return self.everyone.split(self.groups(round))

    def groups(self, round: int) -> list[list[int]]:
        """Return the ranks of each group in a round."""
        workers, size = self.everyone.size, self.size
        if size == 1:
            return [[rank] for rank in range(workers)]
        if self._bits is None:
            order = draw_order(workers, self.seed, round % _PARTITIONS, "butterfly")
            count = -(-workers // size)
            edges = [workers * i // count for i in range(count + 1)]
            return [sorted(order[low:high]) for low, high in itertools.pairwise(edges)]
        bits, width = self._bits
        free = sum(1 << (round * width + i) % bits for i in range(width))  # bits in which members may differ
        together: dict[int, list[int]] = {}
        for rank in range(workers):
            together.setdefault(rank & ~free, []).append(rank)
        return list(together.values())

    def __repr__(self) -> str:
        return f"Butterfly({self.group_size}, seed={self.seed})"
