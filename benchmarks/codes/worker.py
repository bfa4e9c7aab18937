"""One worker of the benchmark of codes, started like a torchrun script; rank 0 prints a line of JSON.

Contenders take turns within every repetition, so that noise of the machine hits all of them alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

import offbeat
from offbeat.tasks import bytes_task


def main() -> None:
    repetitions, *methods = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = bytes_task("large").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    syncs = {m: offbeat.method(m)(model, optimizer) for m in methods}
    noise = [torch.randn_like(p).mul_(1e-3) for p in model.parameters()]
    times: dict[str, list[float]] = {method: [] for method in methods}

    def move() -> None:
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), noise)

    for repetition in range(int(repetitions) + 2):
        for method, sync in syncs.items():
            sync.before_step()
            move()
            dist.barrier()
            start = time.perf_counter()
            sync.after_step()  # all that is left is the round
            if repetition >= 2:  # the first two warm caches and connections up
                times[method].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        sent = {method: sync.reports[-1].bytes_sent for method, sync in syncs.items()}
        print(json.dumps({m: [statistics.median(times[m]), sent[m]] for m in methods}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
