"""One worker of the round benchmark, started like a torchrun script; rank 0 prints a line of JSON.

Contenders take turns within every repetition, so that noise of the machine hits all of them alike.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.utils import average_parameters

import offbeat
from offbeat.base.packed import Packed
from offbeat.base.tensors import local
from offbeat.lab.job import list_cores, share_cores
from offbeat.tasks import bytes_task
from offbeat.tasks.pictures import build_resnet

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "GPT": lambda: bytes_task("large").model(),
    "ResNet": lambda: build_resnet((64, 128, 256, 512), 2, classes=10, seed=0),
}


def rounds(model: torch.nn.Module, **options: str) -> Callable[[], None]:
    """A step without any local work: all that is left is the round."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = offbeat.local_sgd(model, optimizer, every=1, drift=False, **options)
    return lambda: sync.step(lambda: None)


def contenders(build: Callable[[], torch.nn.Module]) -> dict[str, Callable[[], None]]:
    model, laid_flat = build(), offbeat.flatten(build())
    parameters = [local(p) for p in model.parameters()]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    packed = Packed.like({str(i): p for i, p in enumerate(parameters)})
    group = dist.new_group()

    def raw() -> None:
        """One all-reduce of as many bytes in one vector: the yardstick."""
        dist.all_reduce(flat, group=group)

    def copies() -> None:
        """Into the vector and back."""
        packed.read(parameters)
        packed.write(parameters)

    def around() -> None:
        """Into the vector, one all-reduce, and back: the least a round costs where weights are copied."""
        packed.read(parameters)
        dist.all_reduce(packed.flats[0], group=group)
        packed.write(parameters)

    def scaled() -> None:
        """One all-reduce and one scaling: the least it costs where they are not."""
        dist.all_reduce(flat, group=group)
        flat.mul_(1 / dist.get_world_size())

    def averager() -> None:
        average_parameters(iter(model.parameters()), group)

    return {
        "raw": raw,
        "copies": copies,
        "copy, reduce, copy": around,
        "**offbeat**": rounds(model),
        "reduce, scale": scaled,
        "**offbeat, flattened**": rounds(laid_flat),
        "torch averager": averager,
        **({"**offbeat, buffers follow**": rounds(build(), buffers="follow")} if [*model.buffers()] else {}),
    }


def measure(calls: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 2):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if repetition >= 2:  # the first two warm caches and connections up
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, share_cores(size, list_cores())[rank])  # as on the hosts of a lab
    dist.init_process_group("gloo")
    times = measure(contenders(MODELS[sys.argv[1]]), int(sys.argv[2]))
    if dist.get_rank() == 0:
        raw = statistics.median(times["raw"])
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(json.dumps({name: [value, value / raw] for name, value in medians.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
