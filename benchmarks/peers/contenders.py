"""The contenders, and how one worker trains with each of them.

Every contender gets the same model, data, AdamW, schedule and clipping. Offbeat's contenders are one
expression each. The others are used as their documentation says, and `rule` names the method of Offbeat that
does the same: their losses come from its simulation, and one real run of each checks that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

CLIP = 1.0
STEPS, MORE = 300, 400


@dataclass(frozen=True)
class Contender:
    """A row of the tables.

    `call` is Offbeat's expression, or the arguments of a builder below. `rule` is the expression whose
    simulation gives the losses; None for none. `period` is the number of steps from round to round, `start`
    the number of first steps that average gradients in full and so take as long as torch's DDP. `seeds` is
    how many runs the loss is averaged over. `steps` is the length of a whole run, over which the learning
    rate falls. With `pace`, a step takes as long as one of that contender, which is timed in its place. With
    `alike`, the learning rate is the one found for that rule.
    """

    name: str
    kind: str
    call: str = ""
    rule: str | None = None
    period: int = 1
    start: int = 0
    seeds: int = 5
    steps: int = STEPS
    pace: str = ""
    alike: str = ""

    @property
    def losses(self) -> str | None:
        return self.call if self.kind == "offbeat" else self.rule

    @property
    def searched(self) -> str | None:
        """The rule whose search decides on the learning rate."""
        return self.alike or self.losses


def longer(contender: Contender, steps: int) -> Contender:
    """The same with more steps: for those whose steps are fast enough to have time for them."""
    name = f"{contender.name}, {steps} steps"
    return replace(contender, name=name, steps=steps, pace=contender.name, seeds=5)


def ours(call: str, *, period: int = 1, start: int = 0, seeds: int = 5) -> Contender:
    return Contender(f"`{call}`", "offbeat", call, period=period, start=start, seeds=seeds)


def coded(bits: int) -> Contender:
    """`ddp` with a code. Its rates were searched when error feedback kept all losses."""
    code = f"Quantized({bits})"
    alike = f"ddp(reduce=ErrorFeedback({code}, decay=1.0, limit=1e9))"
    return replace(ours(f"ddp(reduce=ErrorFeedback({code}))"), alike=alike)


DDP, FLOOR = "torch DDP", "no communication"
PAPER = "diloco(every=20, lr=0.7, momentum=0.9, ramp=0)"
REFERENCE = Contender(DDP, "torch_ddp", rule="ddp()", seeds=15)
ACCELERATE = Contender(
    "Accelerate LocalSGD, H=20", "accelerate_local_sgd", "every=20", "local_sgd(every=20)", 20
)
FOUR, THREE, TWO = map(coded, (4, 3, 2))
CONTENDERS = [
    Contender(FLOOR, "alone"),
    REFERENCE,
    longer(REFERENCE, MORE),  # so that nobody profits from a longer schedule alone
    Contender("torch averager, H=20", "averager", "every=20", "local_sgd(every=20)", 20),
    Contender("torch averager, H=4", "averager", "every=4", "local_sgd(every=4)", 4),
    Contender(
        "torch PostLocalSGD, 40 steps, then H=20",
        "averager",
        "every=20, warmup=40",
        "post_local_sgd(switch=40, every=20)",
        20,
        40,
    ),
    Contender("torchft LocalSGD, H=20", "torchft_local_sgd", "every=20", "local_sgd(every=20)", 20),
    Contender("torchft DiLoCo, H=20", "torchft_diloco", "every=20", PAPER, 20),
    ACCELERATE,
    longer(ACCELERATE, 338),  # 8 times as fast as torch DDP at 20 Mbit/s
    FOUR,
    longer(FOUR, 315),  # 1.25 times the time without communication, at 50 Mbit/s
    longer(FOUR, MORE),
    ours("ddp(delay=1, reduce=ErrorFeedback(Quantized(4), decay=1.0, limit=1e9))"),
    THREE,
    TWO,
    longer(TWO, MORE),  # 8 times as fast as torch DDP at 20 Mbit/s
    ours("ddp()"),
    ours("local_sgd(every=4, delay=3)", period=4),
    ours("diloco(every=20)", period=20),
]
BY_NAME = {contender.name: contender for contender in CONTENDERS}


MODULES = {
    "torchft_local_sgd": "torchft.local_sgd",
    "torchft_diloco": "torchft.local_sgd",
    "accelerate_local_sgd": "accelerate.local_sgd",
    "averager": "torch.distributed.optim",
}


@dataclass
class Training:
    """One worker's model as it is called, its step, and what ends the run."""

    module: nn.Module
    step: Callable[[], object]
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return lambda: (nn.utils.clip_grad_norm_(model.parameters(), CLIP), optimizer.step())


def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    return Training(model, local_step(model, optimizer))


def torch_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    return Training(DistributedDataParallel(model), local_step(model, optimizer))


def averager(model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int, warmup: int = 0) -> Training:
    """DDP that stops averaging gradients after `warmup` steps, and torch's averager of parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    module = DistributedDataParallel(model)
    state = hooks.PostLocalSGDState(None, None, warmup, post_local_gradient_allreduce=False)
    module.register_comm_hook(state, hooks.post_localSGD_hook)
    averaging = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=every, warmup_steps=warmup))
    return Training(module, lambda: (nn.utils.clip_grad_norm_(model.parameters(), CLIP), averaging.step()))


def torchft_local_sgd(model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int) -> Training:
    from torchft.local_sgd import LocalSGD

    manager, close = torchft_manager(model)
    LocalSGD(manager, model, optimizer, sync_every=every).__enter__()
    return Training(model, local_step(model, optimizer), close=close)


def torchft_diloco(model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int) -> Training:
    """With the outer step of the paper, and all tensors in one message, which is the faster setting."""
    from torchft.local_sgd import DiLoCo

    manager, close = torchft_manager(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    DiLoCo(manager, [model], optimizer, outer, sync_every=every, use_bucketization=True).__enter__()
    return Training(model, local_step(model, optimizer), close=close)


def torchft_manager(model: nn.Module) -> tuple[Any, Callable[[], object]]:
    """A replica group of one process per worker; the lighthouse runs beside worker 0."""
    from torchft import Manager, ProcessGroupGloo
    from torchft._torchft import LighthouseServer

    rank, world, master = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"]) + 2000
    lighthouse = LighthouseServer(bind=f"[::]:{port}", min_replicas=world) if rank == 0 else None
    own = own_address(master)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    dist.barrier()  # the lighthouse listens
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=300)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world,
        use_async_quorum=False,
        timeout=timedelta(seconds=300),
        quorum_timeout=timedelta(seconds=600),
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{master}:{port}",
        replica_id=f"worker{rank}",
        hostname=own,
        init_sync=False,  # the weights are equal already
        max_retries=0,  # a round that fails is an error, not a step without an average
    )

    def close() -> None:
        assert manager.current_step() > 0, f"no round was committed on {store}"  # the store lives until here
        manager.shutdown()
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()

    return manager, close


def own_address(peer: str) -> str:
    """The address of this host on the way to `peer`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def accelerate_local_sgd(model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int) -> Training:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    module = accelerator.prepare(model)
    averaging = LocalSGD(accelerator=accelerator, model=module, local_sgd_steps=every)
    averaging.__enter__()
    step = local_step(model, optimizer)
    return Training(module, lambda: (step(), averaging.step()))


def offbeat_method(
    model: nn.Module, optimizer: torch.optim.Optimizer, call: str, comm: offbeat.Communicator | None = None
) -> Training:
    sync = offbeat.method(call)(model, optimizer, group=comm)
    step = local_step(model, optimizer)
    return Training(model, lambda: sync.step(step), finish=sync.finish)


def build(contender: Contender, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """On a real worker, after init_process_group."""
    if contender.kind == "offbeat":
        return offbeat_method(model, optimizer, contender.call)
    builder: Callable[..., Training] = globals()[contender.kind]
    return builder(model, optimizer, **eval(f"dict({contender.call})"))
