"""One worker in the lab, started like a torchrun script. Its last line is JSON. Two kinds of orders:

worker.py '{"contender": "torch DDP", "setting": {...}, "warm": 2, "steps": 10}'
worker.py '{"contender": "torch DDP", "setting": {...}, "out": "folder"}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import BY_NAME, MODULES
from training import Setting, Worker, real_worker


def counted() -> int:
    """Bytes the kernel has sent on all interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if not line.strip().startswith("lo:"))


def block(worker: Worker, warm: int, steps: int) -> dict[str, float]:
    """A window of a run in progress: what is in flight when it begins is as much as when it ends."""
    worker.begin()
    worker.steps(warm)
    dist.barrier()
    sent, start = counted(), time.perf_counter()
    worker.steps(steps)
    dist.barrier()
    seconds = time.perf_counter() - start
    return {"seconds": seconds / steps, "bytes": (counted() - sent) / steps}


def whole(worker: Worker, out: Path) -> dict[str, float]:
    dist.barrier()
    sent = counted()
    worker.whole_run()
    dist.barrier()
    time.sleep(0.2)
    torch.save(worker.kept, out / f"{worker.rank}.pt")
    return {"seconds": worker.kept[-1][1], "bytes": counted() - sent}


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contender, setting = BY_NAME[order["contender"]], Setting(**order["setting"])
    if "out" not in order:  # a block comes after the first steps, which average gradients
        contender = replace(contender, call=contender.call.replace(f", warmup={contender.start}", ""))
    if contender.kind in MODULES:
        import_module(MODULES[contender.kind])  # before the clock starts
    worker = real_worker(setting, contender, dist.get_rank())
    found = (
        whole(worker, Path(order["out"])) if "out" in order else block(worker, order["warm"], order["steps"])
    )
    print(json.dumps(found), flush=True)
    worker.training.close()
    dist.barrier()
    # Threads of the contenders may still wait for each other, and everything is said.
    os._exit(0)


if __name__ == "__main__":
    main()
