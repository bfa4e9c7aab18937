"""What can go wrong while workers work together.

OffbeatError (a RuntimeError)
├── Disagreement        workers are not doing the same thing: another model, method, step or learning rate
├── NotFinite           a worker was about to send NaN or infinity through a code that cannot
├── PeerLost            a worker left, failed or fell silent while others waited for it
├── Deadlock            in a simulation, nobody can move
└── CheckpointMismatch  a checkpoint that is damaged, or of another run, method, rank or number of workers

Bad arguments are ValueError or TypeError, raised where they are given.
"""

from __future__ import annotations


class OffbeatError(RuntimeError):
    """Everything Offbeat raises about workers and checkpoints."""


class Disagreement(OffbeatError):
    """The workers are not doing the same thing."""


class NotFinite(OffbeatError):
    """A worker was about to send NaN or infinity, or a value too large for what was to be sent."""


class PeerLost(OffbeatError):
    """A worker left, failed or fell silent while others waited for it."""

    def during(self, round: int, step: int) -> PeerLost:
        """The same, with the round it happened in, unless that is known."""
        text = str(self)
        return self if text.startswith("Round ") else PeerLost(f"Round {round} (step {step}): {text}")


class Deadlock(OffbeatError):
    """In a simulation, nobody can move."""


class CheckpointMismatch(OffbeatError):
    """The checkpoint is damaged, or belongs to another run, method, rank or number of workers."""
