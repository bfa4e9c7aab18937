"""Workers that stay slow for a while: what do codes, clusters and dynamic clusters save?

    python benchmarks/coding/clusters.py          # about three minutes

Twenty workers, each computing three parts per step: 0.1 s times an exponential variable for each part, and a
hundred times as long while a worker is slow. A slow worker stays slow with probability 0.95 in the next step.
`rounds` are the rounds of the paper: all workers begin each together, and those who are late give up.
`engine` is `gradient_code` itself on simulated workers, where a late worker ends its part and catches up.
Prints the mean seconds of a step.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

import offbeat
from offbeat.base.draws import uniform
from offbeat.waitfree.clusters import Clusters

WORKERS, CLUSTERS, STRAGGLERS, LOAD = 20, 5, 2, 3
PART, SLOWER, STAY = 0.1, 100.0, 0.95
SHARES = (0.5, 2 / 7, 0.2)


@cache
def slow(share: float, seed: int, rank: int) -> Callable[[int], bool]:
    """Whether a worker is slow in a step: a chain of two states that is slow for this share of the time."""
    states = [uniform(seed, rank, "first") < share]
    become = (1 - STAY) * share / (1 - share)

    def look(step: int) -> bool:
        while len(states) <= step:
            drawn = uniform(seed, rank, len(states), "state")
            states.append(drawn < (STAY if states[-1] else become))
        return states[step]

    return look


def seconds(share: float, seed: int, rank: int, step: int, load: int = LOAD) -> float:
    """Of a worker's parts in a step."""
    drawn = -math.log1p(-uniform(seed, rank, step, "time"))
    return load * PART * drawn * (SLOWER if slow(share, seed, rank)(step) else 1.0)


def rounds(kind: str, share: float, seed: int, steps: int) -> float:
    """The mean time of rounds that all workers begin together."""
    formed, total = Clusters.form(WORKERS, STRAGGLERS, CLUSTERS), 0.0
    missed = [0] * WORKERS
    for step in range(steps):
        load = 1 if kind == "all" else LOAD
        times = [seconds(share, seed, rank, step, load) for rank in range(WORKERS)]
        ordered = sorted(times)
        if kind == "all":
            end = ordered[-1]
        elif kind == "coded":
            end = ordered[-1 - STRAGGLERS]
        else:
            end = max(sorted(times[r] for r in ranks)[-1 - STRAGGLERS] for ranks in formed.ranks)
        total += end
        if (
            kind == "dynamic"
        ):  # the rule of the engine: twice as long as half of the workers, or two rounds missed
            twice = 2 * ordered[WORKERS // 2 - 1]
            missed = [0 if time <= end else before + 1 for time, before in zip(times, missed, strict=True)]
            late = {r for r in range(WORKERS) if (times[r] > twice and end > twice) or missed[r] > 1}
            formed = formed.reform(late)
    return total / steps


def engine(call: str, share: float, seed: int, steps: int) -> float:
    """The mean time of a step of `gradient_code`."""

    def worker(comm: offbeat.Communicator) -> float:
        x = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([x], lr=0.1)
        sync = offbeat.method(call)(nn.ParameterList([x]), optimizer, group=comm)
        for parts in offbeat.coded_sampler(range(WORKERS * steps), sync, batch_size=1, shuffle=False):
            for part in parts:
                (part.weight * x.sum()).backward()
            sync.step()
            optimizer.zero_grad()
        ended = comm.now()
        sync.finish()
        return ended

    ends = offbeat.simulate(worker, WORKERS, compute=lambda r, s: seconds(share, seed, r, s))
    return min(ends) / steps


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}")
    print("\nrounds\n\n| slow | all | coded | clustered | dynamic | clustered ÷ dynamic |")
    print("|---|---|---|---|---|---|")
    for share in SHARES:
        kinds = ("all", "coded", "clustered", "dynamic")
        show(share, [sum(rounds(kind, share, seed, 2000) for seed in range(10)) / 10 for kind in kinds])
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print("\nengine\n\n| slow | clustered | dynamic | clustered ÷ dynamic |\n|---|---|---|---|")
    call = f"gradient_code(stragglers={STRAGGLERS}, clusters={CLUSTERS}, behind=1000"
    for share in SHARES:
        calls = f"{call})", f"{call}, dynamic=True)"
        show(share, [sum(engine(each, share, seed, steps) for seed in range(2)) / 2 for each in calls])


def show(share: float, means: list[float]) -> None:
    cells = " | ".join(f"{mean:.2f}" for mean in means)
    print(f"| {share:.0%} | {cells} | {means[-2] / means[-1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
