"""What can go wrong while workers work together.

OffbeatError (a RuntimeError)
├── Disagreement        workers are not doing the same thing: another model, method, step or learning rate
├── NotFinite           a worker was about to send NaN or infinity through a code that cannot
├── PeerLost            a worker left, failed or fell silent while others waited for it
├── Deadlock            in a simulation, nobody can move
└── CheckpointMismatch  a checkpoint that is damaged, or of another run, method, rank or number of workers

Bad arguments are ValueError or TypeError, raised where they are given. BadArgument is a ValueError that keeps
the argument's name, its value and the reason apart. The command line prints them as `--option value: reason`.
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


class BadArgument(ValueError):
    """An argument that cannot be used: its name, its value and the reason.

    `call` is where the argument was given: the name of a function or class, or a value that prints its own
    call. The message begins with it.
    """

    def __init__(self, name: str, value: object, reason: str, *, call: object = None) -> None:
        super().__init__(name, value, reason)
        self.name, self.value, self.reason = name, value, reason
        given = f"{name}={shown(value)}"
        self.call = given if call is None else f"{call}({given})" if isinstance(call, str) else repr(call)

    def __str__(self) -> str:
        return f"{self.call}: {self.reason}"


def shown(value: object, most: int = 200) -> str:
    """The value as one would type it; of a very long one, its two ends."""
    if isinstance(value, int) and value.bit_length() > 8 * most:
        return f"a number of {value.bit_length()} bits"  # too long to be printed at all
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"
