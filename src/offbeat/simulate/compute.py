"""How long workers compute, and how often they fail."""

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from offbeat.base.draws import uniform, uniforms
from offbeat.base.errors import BadArgument

_BLOCK = 256  # steps drawn at once when asked step by step


def require(holds: bool, value: object, name: str, rule: str) -> None:
    """Refuse the argument `name` of a value, unless the rule for it holds."""
    if not holds:
        raise BadArgument(name, getattr(value, name), f"{name} {rule}.", call=value)


class Compute:
    """The seconds of each step on each worker. A frozen value, so a run depends on its inputs only.

    Call it with a rank and a step for one number. `seconds` returns the same numbers for many at once.
    """

    spread = True  # whether workers or steps differ

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        """Return the seconds of each rank at each step, in float64. Ranks and steps broadcast together."""
        raise NotImplementedError

    def loaded(self, batches: int) -> "Compute":
        """Return the same workers with this number of batches per step. Delays do not grow with it."""
        return Uneven(self, (float(batches),))

    def __call__(self, rank: int, step: int) -> float:
        return _block(self, rank, step // _BLOCK)[step % _BLOCK]


@lru_cache(maxsize=4096)
def _block(compute: Compute, rank: int, block: int) -> list[float]:
    steps = torch.arange(block * _BLOCK, (block + 1) * _BLOCK)
    return compute.seconds(torch.tensor(rank), steps).tolist()


@dataclass(frozen=True)
class Constant(Compute):
    """Every step of every worker takes the same time."""

    step: float
    spread = False

    def __post_init__(self) -> None:
        require(0 < self.step < math.inf, self, "step", "must be a positive number of seconds")

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        return torch.full_like(ranks + steps, self.step, dtype=torch.float64)


@dataclass(frozen=True)
class Jittered(Compute):
    """Log-normal times of mean `step`, with a standard deviation of `jitter` times that."""

    step: float
    jitter: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < self.step < math.inf, self, "step", "must be a positive number of seconds")
        require(0 <= self.jitter <= 100, self, "jitter", "is a share of the step, from 0 to 100")

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        variance = math.log1p(self.jitter**2)
        drawn = uniforms(ranks, steps, self.seed, "jitter").mul_(2).sub_(1).erfinv_()
        return drawn.mul_(math.sqrt(2 * variance)).sub_(variance / 2).exp_().mul_(self.step)


@dataclass(frozen=True)
class HeavyTailed(Compute):
    """Pareto times of mean `step`: most steps are faster, some very slow. Smaller `tail`: wider."""

    step: float
    tail: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < self.step < math.inf, self, "step", "must be a positive number of seconds")
        require(1 < self.tail < math.inf, self, "tail", "must be a finite number above 1, for a finite mean")

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        least = self.step * (self.tail - 1) / self.tail
        return uniforms(ranks, steps, self.seed, "tail").pow_(-1 / self.tail).mul_(least)


@dataclass(frozen=True)
class Recorded(Compute):
    """Step times of a real run, one row per worker, repeated forever. Further workers reuse the rows.

    A worker that reuses a row starts elsewhere in it, so that no two workers are late together.
    """

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or not all(self.rows):
            raise ValueError("Recorded(rows): rows must contain at least one row, and each row one step.")
        if not all(math.isfinite(time) and time >= 0 for row in self.rows for time in row):
            raise ValueError("Recorded(rows): every step must take 0 seconds or more.")

    def __repr__(self) -> str:
        return f"Recorded({len(self.rows)} workers, {sum(map(len, self.rows))} steps)"

    @classmethod
    def read(cls, path: str | PathLike[str]) -> "Recorded":
        """Read a JSON file with one list of seconds per worker."""
        try:
            rows = json.loads(Path(path).read_text())
            return cls(tuple(tuple(float(time) for time in row) for row in rows))
        except (TypeError, json.JSONDecodeError) as error:
            reason = f"this is not a list of seconds for every worker ({error})."
            raise BadArgument("path", str(path), reason, call="Recorded.read") from None

    def write(self, path: str | PathLike[str]) -> None:
        """Write a file for `read`."""
        Path(path).write_text(json.dumps(self.rows))

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        lengths, row = torch.tensor([len(row) for row in self.rows]), ranks % len(self.rows)
        flat = torch.tensor([time for row in self.rows for time in row], dtype=torch.float64)
        shift = (uniforms(ranks, torch.tensor(0), 0, "recorded") * lengths[row]).long()
        shift *= ranks >= len(self.rows)
        return flat[(lengths.cumsum(0) - lengths)[row] + (steps + shift) % lengths[row]]


@dataclass(frozen=True)
class Uneven(Compute):
    """Workers of different speed: rank r takes `factors[r % len(factors)]` times as long."""

    base: Compute
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        positive = all(math.isfinite(factor) and factor > 0 for factor in self.factors)
        require(bool(self.factors) and positive, self, "factors", "must be positive numbers, one or more")

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        factors = torch.tensor(self.factors, dtype=torch.float64)
        return self.base.seconds(ranks, steps) * factors[ranks % len(self.factors)]

    def loaded(self, batches: int) -> Compute:
        return replace(self, base=self.base.loaded(batches))


@dataclass(frozen=True)
class Stragglers(Compute):
    """Each step of each worker is `delay` seconds longer with probability `chance`."""

    base: Compute
    chance: float
    delay: float
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.chance <= 1, self, "chance", "must be from 0 to 1")
        require(0 <= self.delay < math.inf, self, "delay", "must be a number of seconds, 0 or more")

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        late = uniforms(ranks, steps, self.seed, "straggler") < self.chance
        return self.base.seconds(ranks, steps) + late * self.delay

    def loaded(self, batches: int) -> Compute:
        return replace(self, base=self.base.loaded(batches))


@dataclass(frozen=True)
class Late(Compute):
    """One worker is `delay` seconds late in every `every`-th of its steps."""

    base: Compute
    rank: int
    delay: float
    every: int = 1

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        late = (ranks == self.rank) & ((steps + 1) % self.every == 0)
        return self.base.seconds(ranks, steps) + late * self.delay

    def loaded(self, batches: int) -> Compute:
        return replace(self, base=self.base.loaded(batches))


@dataclass(frozen=True)
class Failures:
    """Each worker fails `per_hour` times per hour of work, at random, and is back after `restart` seconds.

    It repeats the work since its last checkpoint; there is one every `checkpoint` seconds of work. A resumed
    run equals an uninterrupted one to the bit, so a failure costs time and nothing else.
    """

    per_hour: float
    restart: float = 60.0
    checkpoint: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("per_hour", "restart", "checkpoint"):
            require(0 <= getattr(self, name) < math.inf, self, name, "must be a finite number, 0 or more")
        require(self.per_hour <= 3600, self, "per_hour", "must be at most 3600, one failure per second")

    @property
    def cost(self) -> float:
        """The average cost of one failure, in seconds."""
        return self.restart + self.checkpoint / 2

    def gap(self, rank: int, number: int) -> float:
        """Return the seconds of work between failure `number` of a worker and the one before."""
        drawn = -math.log1p(-uniform(self.seed, rank, number, "failure")) * 3600
        return drawn / self.per_hour if self.per_hour else math.inf


class Uptime:
    """The failures of one worker over time."""

    def __init__(self, failures: Failures, rank: int) -> None:
        self._failures, self._worked = failures, 0.0
        self._times = accumulate(failures.gap(rank, number) for number in count())
        self._next = next(self._times)

    def lose(self, seconds: float) -> float:
        """Return the seconds lost to failures during the next `seconds` of work."""
        self._worked += seconds
        lost, every = 0.0, self._failures.checkpoint
        while self._next <= self._worked:
            lost += self._failures.restart + (self._next % every if every else 0.0)
            self._next = next(self._times)
        return lost
