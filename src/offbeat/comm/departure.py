"""Why a rank left, and what the others make of it."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.base.errors import CheckpointMismatch, Disagreement, NotFinite, OffbeatError, PeerLost


@dataclass(frozen=True)
class Departure:
    """Why a rank left: its own trouble, or an error that concerns everybody, to be raised by all."""

    text: str
    shared: str | None = None  # the kind of the error

    @classmethod
    def of(cls, error: BaseException) -> Departure:
        for kind in _SHARED:
            if isinstance(error, kind):
                return cls(str(error), shared=kind.__name__)
        return cls(f"failed ({type(error).__name__}: {error})")

    def error(self, rank: int, what: str) -> OffbeatError:
        """What somebody who waits for `what` from this rank raises."""
        for kind in _SHARED:
            if self.shared == kind.__name__:
                return kind(self.text)
        return PeerLost(f"Waiting for {what}: rank {rank} {self.text}.")


_SHARED: tuple[type[OffbeatError], ...] = (CheckpointMismatch, Disagreement, NotFinite, PeerLost)
