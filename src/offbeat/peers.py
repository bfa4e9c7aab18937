"""With whom: everyone, a partner drawn anew each round, or one's own group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offbeat.comm import Communicator, Solo
from offbeat.distributed import Torch
from offbeat.draws import shuffled

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

    def at(self, round: int) -> Communicator:
        """Those of the given round; a pure function of its number."""


@dataclass(frozen=True)
class World:
    """Every round among everyone."""

    group: Group = None

    @property
    def everyone(self) -> Communicator:
        return communicator(self.group)

    def at(self, round: int) -> Communicator:
        return self.everyone

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
        if sorted(rank for group in self.ranks for rank in group) != list(range(size)):
            raise ValueError(f"{self!r}: each of the ranks 0 to {size - 1} must be in exactly one group.")
        return [list(group) for group in self.ranks]
