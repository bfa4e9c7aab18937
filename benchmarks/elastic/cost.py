"""What a round costs with `Elastic`, compared with the same round of a process group, if nobody fails.

    sudo python benchmarks/elastic/cost.py          # four hosts with links of 100 Mbit/s

Each worker averages a model of 10 MB. Rounds of both kinds alternate in blocks, in the same processes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.elastic.lighthouse import load_torchft
from offbeat.lab import Lab, unavailable

HOSTS, RATE, BLOCKS, ROUNDS, PORT = 4, "100mbit", 4, 5, 29511


def make(group: offbeat.Elastic | None) -> tuple[offbeat.Synchronizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.local_sgd(model, optimizer, every=1, drift=False, group=group)
    sync.start()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return sync, model


def work() -> None:
    torch.set_num_threads(1)
    rank, host = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    if rank == 0:
        lighthouse = load_torchft().LighthouseServer(
            bind=f"[::]:{PORT}", min_replicas=HOSTS, join_timeout_ms=60_000, heartbeat_timeout_ms=5_000
        )
    dist.init_process_group("gloo")
    kinds = {
        "Torch": make(None)[0],
        "Elastic": make(offbeat.Elastic(f"http://{host}:{PORT}", least=HOSTS))[0],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(BLOCKS):
        for kind, sync in kinds.items():
            for number in range(ROUNDS + 1):
                dist.barrier()
                time.sleep(0.2)  # a period of local steps, in which the next members are found
                start = time.perf_counter()
                sync.step()
                if number:  # the first one of a block warms up
                    seconds[kind].append(time.perf_counter() - start)
    print(json.dumps(seconds), flush=True)
    dist.barrier()
    if rank == 0:
        lighthouse.shutdown()
    os._exit(0)


def main() -> None:
    if reason := unavailable():
        raise SystemExit(reason)
    with Lab(HOSTS, rate=RATE) as lab:
        runs = lab.run([sys.executable, __file__, "work"], timeout=400)
    found = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    # A round is over when its last worker is done.
    slowest = {
        kind: [max(times) for times in zip(*[own[kind] for own in found], strict=True)] for kind in found[0]
    }
    middle = {kind: statistics.median(times) for kind, times in slowest.items()}
    for kind, times in slowest.items():
        print(f"{kind:8} {len(times)} rounds, seconds: {' '.join(f'{t:.3f}' for t in times)}")
    print(f"median: Torch {middle['Torch']:.3f} s, Elastic {middle['Elastic']:.3f} s, ", end="")
    print(f"Elastic ÷ Torch = {middle['Elastic'] / middle['Torch']:.3f}")


if __name__ == "__main__":
    work() if "work" in sys.argv else main()
