"""One failure per minute: how much of the training goes on, with Offbeat's methods and with torchft's own.

    python benchmarks/elastic/minutes.py --minutes 10 --log benchmarks/elastic/minutes.jsonl
    python benchmarks/elastic/minutes.py --summary benchmarks/elastic/minutes.jsonl

All contenders train at the same time, each with its own lighthouse and workers. First nobody is killed: that
gives the rounds per second of an unharmed run. Then, once per minute, at a moment and with a victim drawn
from the seed, a worker of each contender is killed with SIGKILL and started again at once. A step sleeps, so
that the cores are not what limits it. Progress is the steps that were committed, divided by those of the
unharmed run in the same time. Work counts the steps of all workers whose contribution was in such a round.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from heard import Heard
from torch import nn

import offbeat
from offbeat.elastic.lighthouse import load_torchft

WORKERS, LEAST, EVERY, PAUSE, BEAT, WIDTH = 4, 2, 8, 0.25, 2000, 64
Said = Callable[[int, int], None]  # a round and the number of workers that counted in it


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def compute(model: nn.Module) -> None:
    time.sleep(PAUSE)
    model.zero_grad()
    model(torch.randn(8, WIDTH)).square().mean().backward()


def ours(method: Callable[..., offbeat.Synchronizer], url: str, rank: int, say: Said) -> None:
    model, optimizer = build(rank)
    group = offbeat.Elastic(url, least=LEAST, name=f"worker{rank}", timeout=20)
    sync = method(model, optimizer, every=EVERY, group=group)
    sync.on_report = lambda report: say(report.round, len(report.members) - report.joined)
    sync.start()
    while True:
        compute(model)
        sync.step()


def theirs(kind: str, url: str, rank: int, say: Said) -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    model, optimizer = build(rank)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=LEAST,
        use_async_quorum=False,  # DiLoCo asks for it
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=120),
        connect_timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=url,
        replica_id=f"worker{rank}",
        hostname="127.0.0.1",
    )
    if kind == "diloco":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY).__enter__()
    else:
        LocalSGD(manager, model, optimizer, sync_every=EVERY).__enter__()
    done = manager.current_step()
    while True:
        compute(model)
        optimizer.step()
        if manager.current_step() != done:
            done = manager.current_step()
            say(done, manager.num_participants())


CONTENDERS: dict[str, Callable[[str, int, Said], None]] = {
    "Offbeat local_sgd": functools.partial(ours, offbeat.local_sgd),
    "torchft LocalSGD": functools.partial(theirs, "local_sgd"),
    "Offbeat diloco": functools.partial(ours, offbeat.diloco),
    "torchft DiLoCo": functools.partial(theirs, "diloco"),
}


def work(name: str, url: str, rank: int, said: Any) -> None:
    CONTENDERS[name](url, rank, lambda round, counted: said.send((time.time(), rank, round, counted)))


class Contest:
    """The workers of one contender, and the rounds that they have committed."""

    def __init__(self, name: str, context: Any) -> None:
        server = load_torchft().LighthouseServer
        least = 1 if name.startswith("Offbeat") else LEAST  # Offbeat's workers wait for enough themselves
        self.lighthouse = server(
            bind="[::]:0", min_replicas=least, join_timeout_ms=60_000, heartbeat_timeout_ms=BEAT
        )
        self.url = f"http://127.0.0.1:{self.lighthouse.address().rsplit(':', 1)[1]}"
        self.name, self.said = name, Heard(context)
        self.rounds: dict[int, tuple[float, int]] = {}  # when the first worker committed it; who counted
        self.jobs = [self._start(rank) for rank in range(WORKERS)]
        threading.Thread(target=self._listen, daemon=True).start()

    def _start(self, rank: int) -> Any:
        return self.said.start(work, self.name, self.url, rank)

    def _listen(self) -> None:
        while True:
            with suppress(queue.Empty):
                at, _, round, counted = self.said.get(0.1)
                self.rounds.setdefault(round, (at, counted))

    def replace(self, rank: int) -> None:
        self.jobs[rank].kill()
        self.jobs[rank].join()
        self.jobs[rank] = self._start(rank)

    def judge(self, unharmed: tuple[float, float], storm: tuple[float, float]) -> dict[str, Any]:
        def inside(span: tuple[float, float]) -> list[tuple[float, int]]:
            return sorted(found for found in self.rounds.values() if span[0] <= found[0] < span[1])

        before, during = inside(unharmed), inside(storm)
        factor = (storm[1] - storm[0]) / (unharmed[1] - unharmed[0])
        times = [storm[0], *[at for at, _ in during], storm[1]]
        expected = len(before) * factor
        return {
            "contender": self.name,
            "unharmed": len(before),
            "unharmed_seconds": round(unharmed[1] - unharmed[0], 1),
            "rounds": len(during),
            "seconds": round(storm[1] - storm[0], 1),
            "steps": len(during) * EVERY,
            "progress": round(len(during) / expected, 4),
            "work": round(sum(counted for _, counted in during) / (expected * WORKERS), 4),
            "longest": round(max(b - a for a, b in itertools.pairwise(times)), 2),
        }

    def end(self) -> None:
        for job in self.jobs:
            job.kill()
            job.join()
        self.lighthouse.shutdown()


def summarize(path: Path) -> None:
    print("| contender | rounds in an unharmed minute | rounds in the storm | progress | work of all workers "
          "| longest time without a round |\n|---|---|---|---|---|---|")  # fmt: skip
    for row in map(json.loads, path.read_text().splitlines()):
        minute = row["unharmed"] * 60 / row["unharmed_seconds"]
        storm = f"{row['rounds']} in {row['seconds'] / 60:.0f} min, {row['kills']} kills"
        shares = f"{row['progress']:.1%} | {row['work']:.1%} | {row['longest']} s"
        print(f"| {row['contender']} | {minute:.1f} | {storm} | {shares} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--unharmed", type=float, default=60.0, help="seconds without a failure")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--log", type=Path, default=Path(__file__).parent / "minutes.jsonl")
    parser.add_argument("--summary", type=Path)
    options = parser.parse_args()
    if options.summary:
        return summarize(options.summary)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["offbeat.names", "torch._dynamo", "torchft.local_sgd"])
    contests = [Contest(name, context) for name in options.contenders.split(",")]
    while not all(len(contest.rounds) > 2 for contest in contests):
        time.sleep(0.5)
    start = time.time()
    time.sleep(options.unharmed)
    storm, draw = time.time(), random.Random(0)
    for minute in range(options.minutes):
        moment, victim = storm + 60 * minute + draw.uniform(2, 50), draw.randrange(WORKERS)
        time.sleep(max(0.0, moment - time.time()))
        for contest in contests:
            contest.replace(victim)
        print(f"minute {minute}: worker {victim}", [len(contest.rounds) for contest in contests], flush=True)
    end = storm + 60 * options.minutes
    time.sleep(max(0.0, end - time.time()) + 1)
    rows = [contest.judge((start, storm), (storm, end)) | {"kills": options.minutes} for contest in contests]
    options.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for contest in contests:
        contest.end()
    summarize(options.log)


if __name__ == "__main__":
    main()
