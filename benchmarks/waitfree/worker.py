"""One worker of the benchmark, started by torchrun; rank 0 prints a line of JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from problem import BATCH, DELAY, LR, STEP, Digits, Net, blocking, sgd
from torch import Tensor

import offbeat
from offbeat import GroupReport

TURN = 20  # steps a contender makes in a row
TURNS = 12
WAITFREE = [
    "wagma(every=10, grace=0)",
    "wagma(every=10)",
    "wagma(every=10, late='add')",
]
CONTENDERS = {
    "delayed": ["ddp()", "local_sgd(every=1)", *WAITFREE, "wagma(every=20, late='add')"],
    "even": ["blocking groups", *WAITFREE, "ddp()", "local_sgd(every=1)"],
}


@dataclass
class Contender:
    """A method with its own model, which trains in turns."""

    name: str
    turns: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.net = Net()
        self.optimizer = sgd(self.net)
        build = blocking if self.name == "blocking groups" else offbeat.method(self.name)
        self.sync = build(self.net, self.optimizer)
        self.kinds: list[str] = []
        self.waited = 0.0
        self.sync.on_report = self.hear

    def hear(self, report: offbeat.Report) -> None:
        self.waited += report.seconds_waited
        if isinstance(report, GroupReport):
            self.kinds.append(report.kind)

    def step(self, x: Tensor, y: Tensor, seconds: float, share: float) -> None:
        """`share` of the run is over, and of the learning rate."""
        self.optimizer.param_groups[0]["lr"] = LR * (1 - share)
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
        shared = torch.tensor([late, self.net.way.item() / steps, self.waited / steps])
        dist.all_reduce(shared)
        late, kept, waited = (shared / dist.get_world_size()).tolist()
        clock = torch.tensor(self.turns).cumsum(0).tolist()
        shares = {"kept": kept, "late": late, "waited": waited}
        return {"turns": self.turns, "clock": clock, "losses": self.losses, **shares}


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
    digits = Digits(rank, size)
    contenders = [Contender(name) for name in CONTENDERS[case]]
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else TURNS
    for turn in range(-1, turns):  # the first turn warms up and is not timed
        for contender in contenders:
            draw = torch.Generator().manual_seed(1000 * (turn + 1) + rank)
            dist.barrier()
            began = time.perf_counter()
            for step in range(TURN):
                share = (turn + 1 + step / TURN) / (turns + 1)
                contender.step(*digits.batch(BATCH, draw), delays(case, turn, step)[rank], share)
            dist.barrier()
            if turn >= 0:
                contender.turns.append(time.perf_counter() - began)
                contender.evaluate(*digits.held_out)
    methods = {contender.name: contender.result() for contender in contenders}
    periods = {"ddp()": 1, "local_sgd(every=1)": 1, "wagma(every=20, late='add')": 20, "blocking groups": 1}
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
