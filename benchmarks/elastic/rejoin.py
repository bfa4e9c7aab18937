"""How long a worker that was killed and started again takes until it is back.

    python benchmarks/elastic/rejoin.py               # three workers on this machine, a small model
    sudo python benchmarks/elastic/rejoin.py --lab    # three hosts, links of 100 Mbit/s, 10 M parameters

The last worker is killed with SIGKILL and started again, several times. It is back when it has received the
state of the others and has taken part in a round; it counts one round later. Seconds run from the start of
its process, which is forked from one that has imported torch. The bytes are those that it has received until
it is back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it: before the fork, so that it is not timed
from torch import nn

import offbeat
from offbeat.lab import Lab, unavailable

HOSTS, RATE, PORT, TIMES = 3, "100mbit", 29517, 5
METHODS = ("local_sgd(every=20)", "diloco(every=20)")
_LIGHT = (
    "from torchft import _torchft as t; import time; l = t.LighthouseServer(bind='[::]:{}', min_replicas=1, "
)
_LIGHT += "join_timeout_ms=60000, heartbeat_timeout_ms=2000); time.sleep(10**6)"


def build(size: str) -> nn.Module:
    wide = 1000 if size == "large" else 32
    return nn.Sequential(*[nn.Linear(wide, wide, bias=False) for _ in range(10)])  # large: 10 M parameters


def work(rank: int, expression: str, size: str, line: int) -> None:
    """Train for ever, and write to the pipe what happens."""

    def say(kind: str, **more: Any) -> None:
        os.write(line, (json.dumps({"kind": kind, "t": time.time(), **more}) + "\n").encode())

    say("up")
    torch.set_num_threads(1)
    model = build(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group = offbeat.Elastic(f"http://{os.environ['MASTER_ADDR']}:{PORT}", least=2, name=f"worker{rank}")
    sync = offbeat.method(expression)(model, optimizer, group=group)
    joined: list[bool] = []
    sync.on_join = lambda run: joined.append(True)

    def report(r: offbeat.Report) -> None:
        say("round", round=r.round, received=r.bytes_received, counts=not joined)
        joined.clear()

    sync.on_report = report
    sync.start()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    while True:
        time.sleep(0.1)
        sync.step()


class Child:
    """A worker that is forked from this process, and the lines that it writes."""

    def __init__(self, rank: int, expression: str, size: str) -> None:
        ours, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(ours)
            try:
                work(rank, expression, size, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        self.lines = os.fdopen(ours)

    def until(self, kind: str, **wanted: Any) -> dict[str, Any]:
        for line in self.lines:
            said = json.loads(line)
            if said["kind"] == kind and all(said[key] == value for key, value in wanted.items()):
                return dict(said)
        raise SystemExit("the worker has ended")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def host(expression: str, size: str) -> None:
    """One host: its worker, and on the last one what happens to it."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        light = subprocess.Popen([sys.executable, "-c", _LIGHT.format(PORT)])
    child = Child(rank, expression, size)
    if rank == HOSTS - 1:
        for _ in range(TIMES):
            child.until("round", counts=True)
            child.until("round", counts=True)
            child.kill()
            time.sleep(1)
            child = Child(rank, expression, size)
            up, back = child.until("up")["t"], child.until("round", counts=False)
            counts = child.until("round", counts=True)
            row = {"back": back["t"] - up, "received": back["received"], "counts": counts["t"] - up}
            print(json.dumps({key: round(value, 2) for key, value in row.items()}), flush=True)
        print("done", flush=True)
    try:
        for _ in child.lines:
            pass
    finally:
        if rank == 0:
            light.kill()


def measure(expression: str, size: str, *, lab: bool) -> list[dict[str, float]]:
    command, found = [sys.executable, __file__, "host", expression, size], ""
    if lab:
        with Lab(HOSTS, rate=RATE) as hosts:
            job = hosts.start(command)
            while "done" not in found:
                time.sleep(0.5)
                found = job.stdout(rank=HOSTS - 1)
                assert len(job.running) == HOSTS, found
            job.kill()
            job.close()
    else:
        own = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
        jobs = [
            subprocess.Popen(
                command,
                env={**own, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(HOSTS)
        ]
        try:
            assert jobs[-1].stdout is not None
            while "done" not in found:
                found += jobs[-1].stdout.readline()
        finally:
            for process in jobs:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [json.loads(line) for line in found.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", action="store_true")
    options = parser.parse_args()
    if options.lab and (reason := unavailable()):
        raise SystemExit(reason)
    size = "large" if options.lab else "small"
    parameters = sum(p.numel() for p in build(size).parameters())
    where = f"{HOSTS} hosts with links of {RATE}" if options.lab else f"{HOSTS} workers on one machine"
    print(f"{where}, {parameters:,} parameters, {TIMES} times\n")
    print("| method | seconds until it is back: median, largest | received | takes | until it counts |")
    print("|---|---|---|---|---|")
    for expression in METHODS:
        rows = measure(expression, size, lab=options.lab)
        back, counts = ([row[key] for row in rows] for key in ("back", "counts"))
        received = max(row["received"] for row in rows)
        takes = f"{received * 8 / 100e6:.1f} s" if options.lab else "–"
        times = [f"{statistics.median(found):.1f}, {max(found):.1f}" for found in (back, counts)]
        print(f"| `{expression}` | {times[0]} | {received / 1e6:.1f} MB | {takes} | {times[1]} |", flush=True)


if __name__ == "__main__":
    host(*sys.argv[2:4]) if sys.argv[1:2] == ["host"] else main()
