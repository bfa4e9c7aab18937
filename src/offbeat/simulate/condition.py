"""Waiting for something to become so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Condition:
    """Somebody waits until something is so, or until a time."""

    ready: Callable[[], bool]
    what: str
    deadline: float | None
    since: float | None = None  # when it was seen to be so

    @property
    def due(self) -> float | None:
        return self.deadline if self.since is None else self.since
