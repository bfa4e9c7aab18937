"""How long a worker computes: constant, jittered, heavy-tailed, recorded, and what makes it uneven."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from offbeat.base.draws import uniforms
from offbeat.base.errors import BadArgument

_BLOCK = 256  # steps drawn at once for a worker that asks step by step


class Compute:
    """Seconds of every worker's every step; a frozen value, so that a run is a function of its inputs.

    Called with a rank and a step it answers for one; `seconds` answers for many at once, with the same
    numbers.
    """

    @property
    def spread(self) -> bool:
        """Whether workers or steps differ."""
        return True

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        """Of each rank at each step, for whole numbers that broadcast together, in float64."""
        raise NotImplementedError

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

    def __post_init__(self) -> None:
        _positive(self, self.step)

    @property
    def spread(self) -> bool:
        return False

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        return torch.full_like(ranks + steps, self.step, dtype=torch.float64)


@dataclass(frozen=True)
class Jittered(Compute):
    """Log-normal times of mean `step`, with `jitter` times that as deviation. Larger is wilder."""

    step: float
    jitter: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, self.step)
        if not 0 <= self.jitter <= 100:
            raise BadArgument(
                "jitter", self.jitter, "jitter is a share of the step, from 0 to 100.", call=self
            )

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        variance = math.log1p(self.jitter**2)
        drawn = uniforms(ranks, steps, self.seed, "jitter").mul_(2).sub_(1).erfinv_()
        return drawn.mul_(math.sqrt(2 * variance)).sub_(variance / 2).exp_().mul_(self.step)


@dataclass(frozen=True)
class HeavyTailed(Compute):
    """Pareto times of mean `step`: most a little faster, some very slow. Smaller `tail` is wilder."""

    step: float
    tail: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, self.step)
        if not 1 < self.tail < math.inf:
            raise BadArgument(
                "tail", self.tail, "tail must be a finite number above 1, for a finite mean.", call=self
            )

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        least = self.step * (self.tail - 1) / self.tail
        return uniforms(ranks, steps, self.seed, "tail").pow_(-1 / self.tail).mul_(least)


@dataclass(frozen=True)
class Recorded(Compute):
    """Times of a real run, one row per worker, played again and again; further workers play the same rows.

    A worker that plays a row for the second time begins elsewhere in it, so that no two are late together.
    """

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or not all(self.rows):
            raise ValueError("Recorded(rows): at least one row of one step is needed.")
        if not all(math.isfinite(time) and time >= 0 for row in self.rows for time in row):
            raise ValueError("Recorded(rows): every step must take 0 seconds or more.")

    def __repr__(self) -> str:
        return f"Recorded({len(self.rows)} workers, {sum(map(len, self.rows))} steps)"

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Recorded:
        """From a file of JSON: a list per worker of the seconds of its steps."""
        try:
            rows = json.loads(Path(path).read_text())
            return cls(tuple(tuple(float(time) for time in row) for row in rows))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: a list of seconds for every worker is needed ({error}).") from None

    def write(self, path: str | PathLike[str]) -> None:
        """To a file that `read` understands."""
        Path(path).write_text(json.dumps(self.rows))

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        lengths = torch.tensor([len(row) for row in self.rows])
        flat = torch.tensor([time for row in self.rows for time in row], dtype=torch.float64)
        starts = lengths.cumsum(0) - lengths
        row, lap = ranks % len(self.rows), ranks // len(self.rows)
        shift = (uniforms(ranks, torch.tensor(0), 0, "recorded") * lengths[row]).long() * (lap > 0)
        return flat[starts[row] + (steps + shift) % lengths[row]]


@dataclass(frozen=True)
class Uneven(Compute):
    """Workers of different speed: rank r takes `factors[r]` times as long, beginning anew after the last."""

    base: Compute
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.factors or not all(math.isfinite(f) and f > 0 for f in self.factors):
            raise BadArgument(
                "factors", self.factors, "factors must be positive numbers, one or more.", call=self
            )

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        factors = torch.tensor(self.factors, dtype=torch.float64)
        return self.base.seconds(ranks, steps) * factors[ranks % len(self.factors)]


@dataclass(frozen=True)
class Stragglers(Compute):
    """Each step of each worker is `delay` seconds longer with probability `chance`."""

    base: Compute
    chance: float
    delay: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise BadArgument("chance", self.chance, "chance must be from 0 to 1.", call=self)
        if not (math.isfinite(self.delay) and self.delay >= 0):
            raise BadArgument("delay", self.delay, "delay must be a number of seconds, 0 or more.", call=self)

    def seconds(self, ranks: Tensor, steps: Tensor) -> Tensor:
        late = uniforms(ranks, steps, self.seed, "straggler") < self.chance
        return self.base.seconds(ranks, steps) + late * self.delay


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


def _positive(value: object, step: float) -> None:
    if not (math.isfinite(step) and step > 0):
        raise BadArgument("step", step, "step must be a positive number of seconds.", call=value)
