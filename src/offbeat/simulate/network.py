"""What a message takes in virtual seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Every message takes `latency` seconds plus its bytes over `bandwidth` bytes per second."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency >= 0:
            raise ValueError(f"{self!r}: latency must not be negative.")
        if not self.bandwidth > 0:
            raise ValueError(f"{self!r}: bandwidth must be positive.")

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth
