"""One worker of the overlap benchmark, started like a torchrun script; every rank prints a line of JSON."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

import offbeat
from offbeat.tasks import bytes_task

WARM = 16  # steps before the clock starts, a whole period of every method


def main() -> None:
    expression, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = bytes_task("medium")
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = task.batches(dist.get_rank(), dist.get_world_size(), 4, 0)
    sync = offbeat.method(expression)(model, optimizer)
    for step in range(WARM + steps):
        if step == WARM:  # the start-up left the workers apart by as long as the first weights took
            dist.barrier()
            start = time.perf_counter()
        task.loss(model, next(batches)).backward()
        sync.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    reports = [report for report in sync.reports if report.step > WARM]
    waited, flown = (sum(getattr(r, name) for r in reports) for name in ("seconds_waited", "seconds_in_air"))
    result = {"step": seconds / steps, "rounds": len(reports), "waited": waited, "flown": flown}
    print(json.dumps({**result, "seconds": seconds}), flush=True)
    sync.finish()
    print(json.dumps({"sent": sync.totals.bytes_sent, "received": sync.totals.bytes_received}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
