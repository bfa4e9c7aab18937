"""What a method is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.among import Peers
from offbeat.base.clock import Clock, State
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import Departure
from offbeat.engine.report import Report


class Part:
    """Anything that acts around the local step. Parts are called in the order of their list."""

    model: nn.Module
    peers: Peers
    follows: Part | None = None  # the part it relies on, which must stand directly before it in the list

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Callable[[Report], None]) -> None:
        """Learn the place in the list, the optimizers, and where reports go."""

    def communicators(self) -> list[Communicator]:
        """All it ever talks to."""
        return [self.peers.everyone]

    def observe(self, loss: float | Tensor) -> None:
        """The loss of the coming iteration."""

    def plan(self, clock: Clock) -> None:
        """An iteration begins, with a gradient or without."""

    def before(self, clock: Clock) -> bool:
        """Gradients are ready. False: this part makes the step, not the optimizer."""
        return True

    def stepped(self, optimizer: Optimizer) -> None:
        """In a step that the optimizers do not make, one was told to step, its gradients as they are now."""

    def release(self) -> None:
        """The local step is over, or has failed: undo what was changed for it."""

    def after(self, clock: Clock) -> None:
        """Parameters have moved."""

    def again(self, clock: Clock) -> bool:
        """Whether one more iteration without a gradient follows; if so, this part has made its step."""
        return False

    def shown(self) -> tuple[dict[str, Tensor], bool]:
        """What `averaged()` shows instead of live parameters, and whether it is the same on all workers."""
        return {}, True

    def flush(self, clock: Clock) -> bool:
        """The run ends: land what is in the air; whether anything was changed."""
        return False

    def leave(self, departure: Departure) -> None:
        """This worker fails: whoever waits for it is told, threads end."""
        self.peers.everyone.worker.leave(departure)  # and all it was split into

    def follow(self) -> None:
        """All workers have been given the same weights."""

    def flush_reports(self, *, wait: bool) -> None:
        """Hand in the reports that are complete; with `wait`, all of them."""

    def unreported(self) -> tuple[int, int]:
        """Bytes sent and received since the last call that no report will tell of."""
        return 0, 0

    def shared_gradient(self, step: int) -> bool:
        """Whether all workers made the step that completed `step` iterations with the same gradient."""
        return False

    def made_equal(self, step: int) -> bool:
        """Whether this part left all workers with the same weights and buffers after `step` iterations."""
        return False

    def steps_to_observe(self) -> int:
        """How many iterations show all it ever does, to plan the rest by them; 0 if it sends nothing."""
        return 0

    def savable(self, step: int) -> int:
        """The first step, from `step` on, after which its state can be saved."""
        return step

    def state_dict(self) -> State:
        """Everything it needs to go on; waits for what is in the air, but does not apply it."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
