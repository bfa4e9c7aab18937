"""Errors of workers that train together.

OffbeatError (a RuntimeError)
├── Disagreement        workers differ in model, method, step or learning rate
├── NotFinite           a worker would send NaN or infinity through a code that cannot represent them
├── PeerLost            a worker left, failed or stopped responding while others waited for it
├── RunFinished         an elastic run has ended without this worker
├── Deadlock            in a simulation, no worker can continue
└── CheckpointMismatch  a checkpoint is damaged, or belongs to another run, method, rank or world size

Bad arguments raise ValueError or TypeError where they are passed. BadArgument is a ValueError that keeps the
argument's name, value and reason separate. The command line prints them as `--option value: reason`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class OffbeatError(RuntimeError):
    """The base of all errors about workers and checkpoints."""


class Disagreement(OffbeatError):
    """The workers differ in model, method, step or learning rate."""


class NotFinite(OffbeatError):
    """A worker would send NaN, infinity, or a value too large for the code."""


class PeerLost(OffbeatError):
    """A worker left, failed or stopped responding while others waited for it."""

    def during(self, round: int, step: int) -> PeerLost:
        """Return the error with the round in front, unless it already names one."""
        return self if str(self).startswith("Round ") else PeerLost(f"Round {round} (step {step}): {self}")


class RunFinished(OffbeatError):
    """An elastic run has ended without this worker."""


class Deadlock(OffbeatError):
    """In a simulation, no worker can continue."""


class CheckpointMismatch(OffbeatError):
    """The checkpoint is damaged, or belongs to another run, method, rank or world size."""


class BadArgument(ValueError):
    """A bad argument: its name, its value, and the reason, as the command line prints them.

    The message begins with `call`, the name of a function or class, or a value that prints its own call.
    """

    def __init__(self, name: str, value: object, reason: str, *, call: object = None) -> None:
        super().__init__(name, value, reason)
        self.name, self.value, self.reason = name, value, reason
        given = f"{name}={show(value)}"
        self.call = given if call is None else f"{call}({given})" if isinstance(call, str) else repr(call)

    def __str__(self) -> str:
        return f"{self.call}: {self.reason}"


def show(value: object, most: int = 200) -> str:
    """Return the value as one would type it. A long text is cut in the middle."""
    if isinstance(value, int) and value.bit_length() > 8 * most:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print it
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a question to append to a sentence if the word resembles a known one; otherwise "".

    >>> suggest("dilco", ["ddp", "diloco"])
    " (did you mean 'diloco'?)"
    """
    near = get_close_matches(word, list(known), n=1, cutoff=0.8)
    return f" (did you mean {near[0]!r}?)" if near else ""


def how_to_install(extra: str) -> str:
    """The end of a sentence about something that is not installed.

    >>> how_to_install("cli")
    "pip install -c constraints.txt '.[cli]' in Offbeat's folder."
    """
    return f"pip install -c constraints.txt '.[{extra}]' in Offbeat's folder."
