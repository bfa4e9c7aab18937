"""What a method is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from offbeat.comm import Communicator
from offbeat.cost import Report
from offbeat.peers import Peers
from offbeat.schedule import Clock, State


class Part:
    """Anything that acts around the local step. Parts are called in the order of their list."""

    model: nn.Module
    peers: Peers

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        """Learn the place in the list, the optimizers, and where reports go."""

    def communicators(self) -> list[Communicator]:
        """All it ever talks to."""
        return [self.peers.everyone]

    def before(self, clock: Clock) -> bool:
        """Gradients are ready. False: this part makes the step, not the optimizer."""
        return True

    def after(self, clock: Clock) -> None:
        """Parameters have moved."""

    def flush(self, clock: Clock) -> bool:
        """Land what is in the air; whether there was anything."""
        return False

    def settle(self, *, wait: bool) -> None:
        """Hand in the reports that are complete; with `wait`, all of them."""

    def shared_gradient(self, step: int) -> bool:
        """Whether all workers made the step that completed `step` iterations with the same gradient."""
        return False

    def made_equal(self, step: int) -> bool:
        """Whether this part left all workers with the same weights and buffers after `step` iterations."""
        return False

    def state_dict(self) -> State:
        """Everything it needs to go on; waits for what is in the air, but does not apply it."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
