"""Storms: workers of an elastic run are killed at random moments, and what must hold is checked.

    python benchmarks/elastic/storm.py --seeds 50 --at-once 2 --log benchmarks/elastic/storm.jsonl
    python benchmarks/elastic/storm.py --summary benchmarks/elastic/storm.jsonl

Each trial starts four workers with a method and kills one with SIGKILL at a moment drawn from the seed. The
others must go on. After every committed round all members must have the same anchors and momenta, to the bit,
and the weights at the end must be those of a simulation with the same members, where the method is exact on
dyadic numbers. Trials that the log has already are skipped, so an interrupted storm continues.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import queue
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from heard import Heard
from torch import nn

import offbeat
from offbeat.elastic.lighthouse import load_torchft
from offbeat.elastic.scripted import Attempt, Scripted
from offbeat.engine.agreement import checksum

WORKERS, STEPS, PAUSE, BEAT = 4, 48, 0.02, 1500
METHODS: dict[str, Callable[..., offbeat.Synchronizer]] = {
    "local_sgd": functools.partial(offbeat.local_sgd, every=4),
    "slowmo": functools.partial(offbeat.slowmo, every=4, momentum=0.5, ramp=0),
    "diloco": functools.partial(offbeat.diloco, every=4, lr=0.5, momentum=0.5, ramp=0),
    "streaming_diloco": functools.partial(offbeat.streaming_diloco, every=4, fragments=2, delay=1),
    "cocod": functools.partial(offbeat.cocod, every=4, delay=2),
    "feedback": functools.partial(
        offbeat.diloco, every=4, reduce=offbeat.ErrorFeedback(offbeat.TopK(2, least=1))
    ),
}
EXACT = ("local_sgd", "slowmo", "diloco")
SIMULATING = threading.Lock()  # one simulation at a time


def build(name: str, group: Any, rank: int) -> tuple[nn.Module, offbeat.Synchronizer]:
    torch.manual_seed(0)  # the worker whose weights the others start from may die before the first round
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-8, 8, parameter.shape) * 12 / 2**6)
    return model, METHODS[name](model, torch.optim.SGD(model.parameters(), lr=0.5), group=group)


def step(model: nn.Module, sync: offbeat.Synchronizer, rank: int) -> None:
    """Gradients are multiples of 12 / 2¹⁰, so that means over three and four workers are exact."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (rank + 1) * (sync.steps % 3 + i + 1) * 12 / 2**10)
    sync.step()


def shared(sync: offbeat.Synchronizer) -> int:
    """A checksum of all anchors, momenta and last means."""

    def tensors(value: Any) -> list[torch.Tensor]:
        if torch.is_tensor(value):
            return [value]
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [tensor for item in inside for tensor in tensors(item)]

    states = [{k: v for k, v in p._states["update"].items() if k != "sent"} for p in sync.parts]
    return checksum([*tensors(states), *sync._commits.find_consensus().values()])


def work(url: str, rank: int, name: str, logs: Path | None, said: Any) -> None:
    torch.set_num_threads(1)
    if logs is not None:
        line = f"%(asctime)s worker {rank}: %(message)s"
        logging.basicConfig(level=logging.INFO, format=line, filename=logs / f"{rank}.log", filemode="w")
    model, sync = build(name, offbeat.Elastic(url, name=f"{rank:04}", timeout=20), rank)
    sync.on_report = lambda r: said.send((rank, "round", time.time(), (r.members, r.joined, r.repeats)))
    try:
        with sync:
            sync.start()
            said.send((rank, "started", time.time(), sync.steps))
            rounds = 0
            while sync.steps < STEPS:
                time.sleep(PAUSE)
                step(model, sync, rank)
                if sync._commits.rounds > rounds:
                    rounds = sync._commits.rounds
                    said.send((rank, "state", time.time(), (sync._commits.lineage, shared(sync))))
        said.send((rank, "end", time.time(), checksum([p.detach() for p in model.parameters()])))
    except BaseException as error:
        said.send((rank, "failed", time.time(), f"{type(error).__name__}: {error}"))


def simulate(name: str, script: list[Attempt], size: int) -> int:
    def worker(comm: offbeat.Communicator) -> int | None:
        model, sync = build(name, Scripted(comm, script), comm.rank)
        try:
            with sync:
                sync.start()
                while sync.steps < STEPS:
                    step(model, sync, comm.rank)
        except offbeat.PeerLost:
            return None
        return checksum([p.detach() for p in model.parameters()])

    (end,) = {end for end in offbeat.simulate(worker, size) if end is not None}
    return end


def trial(name: str, seed: int, url: str, context: Any, logs: Path | None = None) -> dict[str, Any]:
    """Kill one of four workers, after a time drawn from the seed. Return what was seen."""
    draw, said = random.Random(f"{name} {seed}"), Heard(context)
    jobs = [said.start(work, url, rank, name, logs) for rank in range(WORKERS)]
    victim, heard, killed = draw.randrange(WORKERS), list[Any](), 0.0
    moment, ends, deadline = draw.uniform(0.0, STEPS * PAUSE * 0.8), dict[int, int](), time.time() + 120
    started = 0.0
    try:
        while time.time() < deadline and len(ends) < WORKERS - bool(killed):
            try:
                heard.append(said.get(timeout=0.01))
                if heard[-1][1] == "end":
                    ends[heard[-1][0]] = heard[-1][3]
                if heard[-1][1] == "failed":
                    break
            except queue.Empty:
                pass
            started = started or (time.time() if any(kind == "started" for _, kind, _, _ in heard) else 0.0)
            if started and not killed and time.time() > started + moment and victim not in ends:
                jobs[victim].kill()
                killed = time.time()
    finally:
        exits = [job.exitcode for job in jobs]  # None: it still ran
        for job in jobs:
            job.kill()
            job.join()
    return judge(name, seed, victim, killed, heard, ends, exits)


def judge(
    name: str, seed: int, victim: int, killed: float, heard: list[Any], ends: dict[int, int], exits: list[Any]
) -> dict[str, Any]:
    states: dict[str, set[int]] = {}
    for _, kind, _, value in heard:
        if kind == "state":
            states.setdefault(value[0], set()).add(value[1])
    reports = [(rank, at, value) for rank, kind, at, value in heard if kind == "round" and rank != victim]
    said = Counter(rank for rank, _, _ in reports)
    first = max((rank for rank in range(WORKERS) if rank != victim), key=lambda rank: said[rank])
    rounds = [(at, value) for rank, at, value in reports if rank == first]  # others may have come later
    after = [
        at - killed for at, (members, _, _) in rounds if killed and at > killed and len(members) < WORKERS
    ]
    found = {
        "method": name,
        "seed": seed,
        "ended": len({*ends} - {victim}) == WORKERS - 1,
        "equal": len(set(ends.values())) == 1 and all(len(sums) == 1 for sums in states.values()),
        "rounds": len(rounds),
        "repeats": sum(repeats for _, (_, _, repeats) in rounds),
        "seconds": round(after[0], 2) if after else None,
        "exits": exits,
        "errors": [value for _, kind, _, value in heard if kind == "failed"],
    }
    if name in EXACT and found["ended"] and found["equal"]:
        seen = {rank for rank, kind, _, at in heard if kind == "started" and at == 0}
        script = []
        for _, (names, _, _) in rounds:
            members = [int(member.split(":")[0]) for member in names]
            script.append(Attempt(members, sorted(set(members) - seen)))
            seen |= set(members)
        with SIMULATING:
            found["simulated"] = simulate(name, script, WORKERS) == ends[first]
    return found


def summarize(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print("| method | trials | all survivors ended | states equal | equal to simulation | repeated "
          "| seconds from kill to commit: median, largest | over 5 |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        if own:
            late = [row["seconds"] for row in own if row["seconds"] is not None]
            times = f"{statistics.median(late):.2f}, {max(late):.2f}" if late else "–"
            same = f"{sum(row['simulated'] for row in own if 'simulated' in row)}" if name in EXACT else "–"
            counts = [sum(bool(row[key]) for row in own) for key in ("ended", "equal")]
            repeated = sum(row["repeats"] > 0 for row in own)
            cells = [name, len(own), *counts, same, repeated, times, sum(seconds > 5 for seconds in late)]
            print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--log", type=Path, default=Path(__file__).parent / "storm.jsonl")
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--logs", type=Path, help="a folder for the logs of the workers of each trial")
    parser.add_argument("--at-once", type=int, default=1, help="trials at the same time")
    options = parser.parse_args()
    if options.summary:
        return summarize(options.summary)
    options.log.touch()
    done = {(row["method"], row["seed"]) for row in map(json.loads, options.log.read_text().splitlines())}
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["offbeat.names", "torch._dynamo"])
    server, writing = load_torchft().LighthouseServer, threading.Lock()

    def attempt(name: str, seed: int) -> None:
        lighthouse = server(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=BEAT)
        url = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
        logs = options.logs and options.logs / f"{name}-{seed}"
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        row = trial(name, seed, url, context, logs)
        lighthouse.shutdown()
        with writing, options.log.open("a") as log:
            print(json.dumps(row), flush=True)
            log.write(json.dumps(row) + "\n")

    trials = [(name, seed) for seed in range(options.seeds) for name in options.methods.split(",")]
    with ThreadPoolExecutor(options.at_once) as pool:  # workers mostly sleep
        list(pool.map(lambda one: attempt(*one), [one for one in trials if one not in done]))


if __name__ == "__main__":
    main()
