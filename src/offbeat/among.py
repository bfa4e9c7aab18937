"""With whom: everyone, a partner drawn anew each round, one's own group, or groups that mix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offbeat.base.checks import is_whole
from offbeat.base.draws import shuffled
from offbeat.comm.communicator import Communicator, Solo
from offbeat.comm.torch_backend import Torch

Group = Communicator | dist.ProcessGroup | DeviceMesh | None

_communicators: WeakKeyDictionary[dist.ProcessGroup, Torch] = WeakKeyDictionary()


def communicator(group: Group = None) -> Communicator:
    """The communicator of a group: of the default process group, or a world of one, when nothing is given.

    One process group always gets the same communicator, so several synchronizers share its connections.
    """
    if isinstance(group, Communicator):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group={group}: a mesh of one axis is needed, not of {group.ndim}: pass mesh['replica']."
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Solo()
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: a ProcessGroup, a one-axis DeviceMesh or a Communicator is needed."
        )
    if group not in _communicators:
        _communicators[group] = Torch(group)
    return _communicators[group]


class Peers(Protocol):
    """With whom a round is held."""

    @property
    def everyone(self) -> Communicator:
        """All workers that share the model."""

    @property
    def fixed(self) -> bool:
        """Whether the groups are the same in every round."""

    def at(self, round: int) -> Communicator:
        """Those of the given round; a pure function of its number."""


@dataclass(frozen=True)
class World:
    """Every round among everyone."""

    group: Group = None

    @property
    def everyone(self) -> Communicator:
        return communicator(self.group)

    @property
    def fixed(self) -> bool:
        return True

    def at(self, round: int) -> Communicator:
        return self.everyone

    @property
    def cycle(self) -> int:
        """After so many rounds the groups repeat."""
        return 1

    def __repr__(self) -> str:
        return "World()"


@dataclass(frozen=True)
class Pairs:
    """Every round in pairs, drawn anew from `seed` and the round; of an odd number one stays alone."""

    group: Group = None
    seed: int = 0

    @property
    def everyone(self) -> Communicator:
        return communicator(self.group)

    @property
    def fixed(self) -> bool:
        return self.everyone.size <= 2

    def at(self, round: int) -> Communicator:
        order = shuffled(self.everyone.size, self.seed, round, "pairs")
        return self.everyone.split([sorted(order[i : i + 2]) for i in range(0, len(order), 2)])

    def __repr__(self) -> str:
        return f"Pairs(seed={self.seed})"


@dataclass(frozen=True)
class Subgroups:
    """Every round inside one's own group: so many consecutive ranks each, or the ranks as listed."""

    ranks: int | Sequence[Sequence[int]]
    group: Group = None

    def __post_init__(self) -> None:
        self._groups()

    @property
    def everyone(self) -> Communicator:
        return communicator(self.group)

    @property
    def fixed(self) -> bool:
        return True

    def at(self, round: int) -> Communicator:
        return self.everyone.split(self._groups())

    def __repr__(self) -> str:
        return f"Subgroups({self.ranks!r})"

    def _groups(self) -> list[list[int]]:
        size = self.everyone.size
        if isinstance(self.ranks, int):
            if self.ranks < 1 or size % self.ranks:
                raise ValueError(
                    f"{self!r}: {size} workers cannot be cut into groups of {self.ranks}; list the ranks "
                    "of each group for uneven ones."
                )
            return [list(range(start, start + self.ranks)) for start in range(0, size, self.ranks)]
        lists = isinstance(self.ranks, Sequence) and all(
            isinstance(group, list | tuple) for group in self.ranks
        )
        if not lists or not all(isinstance(rank, int) for group in self.ranks for rank in group):
            raise TypeError(f"{self!r}: how many ranks a group has, or a list of ranks for each, is needed.")
        if sorted(rank for group in self.ranks for rank in group) != list(range(size)):
            raise ValueError(f"{self!r}: each of the ranks 0 to {size - 1} must be in exactly one group.")
        return [list(group) for group in self.ranks]


_DRAWN = 16  # partitions of a number of workers that is no power of two; each keeps its connections


@dataclass(frozen=True)
class Butterfly:
    """Every round in groups of `group_size`, other ones each time, so that few rounds mix everyone.

    With powers of two, p and q are together in round t iff p XOR q has ones only among the log₂ S bits that
    begin at (t·log₂ S) mod log₂ K, around the corner: log₂ K / log₂ S rounds at rate 0 are the mean of all.
    Otherwise an order of the workers drawn from `seed` and the round is cut into nearly equal groups. Nothing
    said, S is 2^⌈log₂ K / 2⌉; larger mixes faster, and each round takes longer.
    """

    group_size: int | None = None
    group: Group = None
    seed: int = 0

    def __post_init__(self) -> None:
        size = self.group_size
        if size is not None and not is_whole(size, 1):
            raise ValueError(f"group_size={size!r}: a number of workers, 1 or more, is needed.")

    @property
    def everyone(self) -> Communicator:
        return communicator(self.group)

    @property
    def size(self) -> int:
        """Workers in a group, at most."""
        workers = self.everyone.size
        wanted = 2 ** math.ceil(math.log2(workers) / 2) if self.group_size is None else self.group_size
        return min(wanted, workers)

    @property
    def cycle(self) -> int:
        """After so many rounds the groups repeat."""
        if self.size in (1, self.everyone.size):
            return 1
        if self._regular:
            bits, width = _log2(self.everyone.size), _log2(self.size)
            return bits // math.gcd(bits, width)
        return _DRAWN

    @property
    def fixed(self) -> bool:
        return self.cycle == 1

    def at(self, round: int) -> Communicator:
        return self.everyone.split(self.groups(round))

    def groups(self, round: int) -> list[list[int]]:
        """Who is with whom, a function of the round."""
        workers, size = self.everyone.size, self.size
        if size == workers:
            return [list(range(workers))]
        if size == 1:
            return [[rank] for rank in range(workers)]
        if self._regular:
            together: dict[int, list[int]] = {}
            for rank in range(workers):
                together.setdefault(rank & ~self._mask(round), []).append(rank)
            return list(together.values())
        order = shuffled(workers, self.seed, round % _DRAWN, "butterfly")
        count = -(-workers // size)
        edges = [workers * i // count for i in range(count + 1)]
        return [sorted(order[low:high]) for low, high in itertools.pairwise(edges)]

    @property
    def _regular(self) -> bool:
        return all(n & (n - 1) == 0 for n in (self.everyone.size, self.size))

    def _mask(self, round: int) -> int:
        """The bits in which members of a group may differ."""
        bits, width = _log2(self.everyone.size), _log2(self.size)
        return sum(1 << (round * width + r) % bits for r in range(width))

    def __repr__(self) -> str:
        return f"Butterfly({self.group_size}, seed={self.seed})"


def _log2(power: int) -> int:
    return power.bit_length() - 1
