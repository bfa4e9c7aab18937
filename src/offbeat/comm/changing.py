"""The seam between rounds and membership: workers that come and go, and what they tell before a round."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch

from offbeat.base.clock import State
from offbeat.base.errors import OffbeatError
from offbeat.comm.communicator import Communicator, Wrapped

Give = Callable[[], State | None]
"""Waits for the state that a worker may continue from. None: this worker gives none any more."""


@dataclass(frozen=True)
class Card:
    """What a worker tells all others before a round. A lineage stands for all rounds committed so far."""

    method: str  # a digest of the method and the model
    call: str  # the method as one would type it, for errors
    lineage: str = ""  # empty if the worker has no state yet
    rounds: int = -1  # in that lineage
    entered: int = 0  # how many of them were over when the worker came; one more if it has joined
    prepared: str = ""  # the lineage with one more round, which has arrived here but may be committed nowhere
    place: float = inf  # the step of the call that the worker waits in; ∞: of the next round
    open: bool = False  # a worker that joins now can receive the state of this one
    over: bool = False  # the run is finished on this worker


@dataclass(frozen=True)
class Members:
    """Who takes part in the next round, in the order of ranks."""

    names: tuple[str, ...]
    key: str = ""  # of the connections: a new one for each set of members and each attempt
    lineage: str = ""  # of all members, once those that lack a round have got it
    broken: bool = False  # a worker was lost before all were connected and healed
    starts: bool = False  # nobody has a state: all begin with that of rank 0
    partial: bool = False  # others wait in a later call, which these must reach first
    entered: tuple[int, ...] = ()  # the same of each of them
    state: State | None = field(default=None, repr=False)  # what this worker has received


def unite(inside: Communicator, *flags: bool) -> list[bool]:
    """Say which of these flags are set on all ranks."""
    rows = inside.tell([int(flag) for flag in flags]).wait()
    return [all(row[i] for row in rows) for i in range(len(flags))]


class Changing(Wrapped):
    """A communicator whose members may change between two rounds. Until it has members it is a world of one.

    `rank`, `size` and the communicator inside are those of the last answer. What runs between two answers
    keeps the communicator inside.
    """

    members: Members
    device = torch.device("cpu")  # of the model: where a state is received
    finished = False  # whether the run has come to its end here
    may_end = False  # whether this worker lacks nothing, so that it may end without the others
    inside: Communicator | None = None  # the processes of this worker, if its model is sharded over several

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.healed: deque[tuple[int, int]] = deque()  # bytes sent and received, for each state passed on

    @abstractmethod
    def ask(self, card: Card, give: Give) -> None:
        """Ask for the next members, beside the training loop. `give` is called if this worker heals one."""

    @abstractmethod
    def answer(self) -> Members:
        """Wait for the members that were asked for, connected and healed."""

    @abstractmethod
    def fail(self, error: OffbeatError) -> None:
        """The connections are of no use any more: tell the others, who may wait for this worker."""

    @abstractmethod
    def close(self) -> None:
        """This worker takes part in no further round."""

    def shard(self, inside: Communicator) -> None:
        """The model is sharded over these processes, which together are one worker."""
        raise ValueError(f"group={self!r}: the workers of this group cannot have sharded models.")

    def unite(self, *flags: bool) -> list[bool]:
        """Say which of these flags are set on all processes of this worker."""
        return list(flags) if self.inside is None else unite(self.inside, *flags)

    def wrap(self, comm: Communicator) -> Communicator:
        return comm

    def _replace(self, comm: Communicator, members: Members) -> None:
        self.comm, self.rank, self.size, self.members = comm, comm.rank, comm.size, members
        self._children = {}


def refusal(group: Changing, reason: str) -> ValueError:
    """The error of a method that cannot run in this group."""
    return ValueError(f"group={group!r}: the method cannot go on without a worker: {reason}.")
