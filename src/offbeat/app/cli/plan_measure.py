"""The measurements of `offbeat plan --measure`."""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from offbeat.among import communicator
from offbeat.app.cli.refusal import Refused, reading
from offbeat.comm.communicator import Communicator
from offbeat.plan.measure import Measured, gathered, measure_link, measure_script, measure_task
from offbeat.simulate import Network, Recorded
from offbeat.tasks import find_task


@dataclass
class Found:
    """The measurements, if any, and the workers that took part."""

    comm: Communicator | None = None
    step: Measured | None = None
    compute: Recorded | None = None
    network: Network | None = None
    points: tuple[tuple[int, float], ...] = ()

    @property
    def leads(self) -> bool:
        return self.comm is None or self.comm.rank == 0

    def leave(self) -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def measure_all(given: SimpleNamespace) -> Found:
    """Time the task or script and the link, as the options ask."""
    task, script = given.task, given.script
    if not given.measure:
        if task or script:
            raise Refused("--task and --script need --measure.")
        return Found()
    if (task is None) == (script is None):
        raise Refused("--measure needs either --task or --script.")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with reading():
        if script is not None:
            path, *arguments = script.split()
            step = measure_script(path, arguments)  # first: it may join a group of its own
        comm = _join()
        if task is not None:
            step = measure_task(
                find_task(task, size=given.model, data=given.data, seed=0), comm, batch=given.batch
            )
        network, points = measure_link(comm) if comm.size > 1 else (None, [])
    return Found(comm, step, gathered(comm, step), network, tuple(points))


def _join() -> Communicator:
    """Join the workers that torchrun or a lab started."""
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return communicator()
