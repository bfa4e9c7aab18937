"""One worker of the benchmark, started by torchrun; rank 0 prints a line of JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offbeat
from offbeat import Butterfly, Every, Exchange, GroupReport, Synchronizer, World, params

STEP = 0.020  # seconds a gradient takes at least
DELAY = 8 * STEP  # seconds more for a random quarter of the workers
TURN = 20  # steps a contender makes in a row
TURNS = 12
BATCH = 32
CONTENDERS = {
    "delayed": [
        "ddp()",
        "local_sgd(every=1)",
        "wagma(every=10)",
        "wagma(every=10, grace=0)",
        "wagma(every=20)",
        "eager_sgd(every=10)",
    ],
    "even": ["blocking groups", "wagma(every=10)", "wagma(every=10, grace=0)", "ddp()"],
}


class Net(nn.Module):
    """A small network, and a number that grows by one with every step that is not lost."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.body = nn.Sequential(*hidden, nn.Linear(256, 10))
        self.way = nn.Parameter(torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


def blocking(model: nn.Module, optimizer: torch.optim.Optimizer) -> Synchronizer:
    """The same averages as those of wagma, each of them waited for."""
    return Synchronizer(
        optimizer,
        [
            Exchange(params(model), when=Every(1, skip=10), among=Butterfly(), drift=False),
            Exchange(params(model), when=Every(10), among=World(), drift=False),
        ],
    )


@dataclass
class Contender:
    """A method with its own model, which trains in turns."""

    name: str
    turns: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.net = Net()
        groups = [
            {"params": self.net.body.parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": [self.net.way], "lr": 1.0},
        ]
        self.optimizer = torch.optim.SGD(groups)
        build = blocking if self.name == "blocking groups" else offbeat.method(self.name)
        self.sync = build(self.net, self.optimizer)
        self.kinds: list[str] = []
        self.sync.on_report = lambda report: (
            self.kinds.append(report.kind) if isinstance(report, GroupReport) else None
        )

    def step(self, x: Tensor, y: Tensor, seconds: float) -> None:
        began = time.perf_counter()
        (self.net.loss(x, y) - self.net.way).backward()
        time.sleep(max(0.0, STEP + seconds - (time.perf_counter() - began)))
        self.sync.step()
        self.optimizer.zero_grad()

    def evaluate(self, x: Tensor, y: Tensor) -> None:
        with self.sync.averaged(), torch.no_grad():
            self.losses.append(self.net.loss(x, y).item())

    def result(self) -> dict[str, object]:
        late = sum(kind != "fresh" for kind in self.kinds) / max(1, len(self.kinds))
        steps = self.sync.steps
        self.sync.finish()
        shared = torch.tensor([late, self.net.way.item() / steps])
        dist.all_reduce(shared)
        late, kept = (shared / dist.get_world_size()).tolist()
        clock = torch.tensor(self.turns).cumsum(0).tolist()
        return {"turns": self.turns, "clock": clock, "losses": self.losses, "kept": kept, "late": late}


def delays(case: str, turn: int, step: int) -> list[float]:
    """Of all workers; the same for every contender."""
    size = dist.get_world_size()
    slow = random.Random(f"{turn} {step}").sample(range(size), size // 4) if case == "delayed" else []
    return [DELAY if rank in slow else 0.0 for rank in range(size)]


def limit(case: str, every: int, turns: int) -> float:
    """Throughput of workers that meet every so many steps ÷ that of workers that meet at every step, if
    messages take no time."""
    met = together = 0.0
    for turn in range(turns):
        rows = [delays(case, turn, step) for step in range(TURN)]
        together += sum(STEP + max(row) for row in rows)
        for first in range(0, TURN, every):
            period = zip(*rows[first : first + every], strict=True)
            met += max(sum(STEP + delay for delay in worker) for worker in period)
    return together / met


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:][rank::size]
    contenders = [Contender(name) for name in CONTENDERS[case]]
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else TURNS
    for turn in range(-1, turns):  # the first turn warms up and is not timed
        for contender in contenders:
            draw = torch.Generator().manual_seed(1000 * (turn + 1) + rank)
            dist.barrier()
            began = time.perf_counter()
            for step in range(TURN):
                chosen = train[torch.randint(len(train), (BATCH,), generator=draw)]
                contender.step(images[chosen], labels[chosen], delays(case, turn, step)[rank])
            dist.barrier()
            if turn >= 0:
                contender.turns.append(time.perf_counter() - began)
                contender.evaluate(images[test], labels[test])
    methods = {contender.name: contender.result() for contender in contenders}
    periods = {"ddp()": 1, "local_sgd(every=1)": 1, "wagma(every=20)": 20, "blocking groups": 1}
    limits = {name: limit(case, periods.get(name, 10), turns) for name in methods}
    if rank == 0:
        result = {
            "workers": size,
            "case": case,
            "steps": TURN * turns,
            "turn": TURN,
            "step_seconds": STEP,
            "delay_seconds": DELAY if case == "delayed" else 0.0,
            "limits": limits,
            "methods": methods,
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
