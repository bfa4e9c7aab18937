"""What a run spends, and when its clocks repeat themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

_ROUNDING = 1e-12  # a smaller share of a period is not a difference


@dataclass
class Spent:
    """Seconds on each network: the mean over runs, the variance, and where they go."""

    mean: Tensor
    variance: Tensor
    computed: Tensor
    skewed: Tensor
    exposed: Tensor
    flown: Tensor

    def add(self, other: "Spent", *, computing: float, rounds: float) -> None:
        """Add several independent windows like this one: how many for gradients, and how many for rounds."""
        self.mean += computing * other.computed + rounds * (other.mean - other.computed)
        self.computed += computing * other.computed
        for name in ("variance", "skewed", "exposed", "flown"):
            getattr(self, name).add_(getattr(other, name), alpha=rounds)


@dataclass(frozen=True)
class Instant:
    """All times after some steps, by names that do not depend on the step, and the seconds spent so far."""

    now: Tensor
    times: Mapping[object, Tensor]
    seconds: Tensor

    def repeats(self, earlier: "Instant") -> bool:
        """Whether all times are as far from `now` as they were. If so, they stay so."""
        if self.times.keys() != earlier.times.keys():
            return False
        passed = self.now - earlier.now
        moved = [self.times[name] - earlier.times[name] for name in self.times]
        return all(bool(((each - passed).abs() <= _ROUNDING * passed).all()) for each in moved)
