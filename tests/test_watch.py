"""What works against a method is said once, with its place; what does not is never said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import frameworks
import pytest
import torch
import torch.distributed as dist
from conftest import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.engine.watch import StepWatch

STEPS = 20
DDP = (
    "DistributedDataParallel averages every gradient, which costs what local_sgd() saves: train the model "
    "itself, without the wrapper (in Accelerate, prepare_model(model, evaluation_mode=True); in "
    "transformers, OffbeatTrainer; in Lightning, OffbeatStrategy)."
)
Step = Callable[[int], object]


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of Offbeat in this process."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("offbeat").removeHandler(handler)


def train(
    comm: offbeat.Communicator,
    model: nn.Module,
    every_step: Step = lambda step: None,
    *,
    called: nn.Module | None = None,
    expression: str = "local_sgd(every=8)",
    group: Any = None,
    rank: int | None = None,
) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, hooks = dict(vars(ProcessGroup)), len(optimizer._optimizer_step_post_hooks)
    draw = torch.Generator().manual_seed(comm.rank if rank is None else rank)
    with heard() as said:
        sync = offbeat.method(expression)(model, optimizer, group=comm if group is None else group)
        for step in range(STEPS):
            (called or model)(torch.randn(4, 3, generator=draw)).square().mean().backward()
            every_step(step)
            sync.step()
            optimizer.zero_grad()
            if step == 10:
                with sync.averaged():
                    dist.barrier()
        assert sync._watch is None
        assert len(optimizer._optimizer_step_post_hooks) == hooks
        assert dict(vars(ProcessGroup)) == before
        sync.finish()
    return said


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def many(comm: offbeat.Communicator) -> dict[str, list[str]]:
    """All cases in one order, since workers take long to start."""
    from torch.distributed import all_reduce

    everyone: list[Any] = [None] * comm.size
    said = {
        "own": train(comm, linear()),
        "barrier": train(comm, linear(), lambda step: dist.barrier() if step % 4 == 0 else None),
        "sum": train(comm, linear(), lambda step: all_reduce(torch.ones(1))),
        "objects": train(comm, linear(), lambda step: dist.all_gather_object(everyone, step)),
        "every step": train(
            comm, linear(), lambda step: all_reduce(torch.ones(1)), expression="local_sgd(every=1)"
        ),
    }
    inner = linear()
    said["ddp"] = train(comm, inner, called=DistributedDataParallel(inner))
    inner = nn.Linear(3, 3)
    wrapper = DistributedDataParallel(inner)
    wrapper.require_backward_grad_sync = False
    said["ddp, not averaging"] = train(comm, inner, called=wrapper)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    sharded = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fully_shard(sharded, mesh=mesh["shard"])
    said["sharded"] = train(comm, sharded, group=mesh["replica"], rank=mesh["replica"].get_local_rank())
    said["same data"] = train(comm, linear(), rank=0)
    fail(comm, linear())
    return said


def fail(comm: offbeat.Communicator, model: nn.Module) -> None:
    """A run that fails while calls are traced leaves torch and the optimizer as they were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(vars(ProcessGroup))
    sync = offbeat.local_sgd(model, optimizer, every=8, group=comm)
    assert optimizer._optimizer_step_post_hooks
    for _ in range(14):
        model(torch.ones(4, 3)).square().mean().backward()
        dist.all_reduce(torch.ones(1))
        sync.step()
    assert (dict(vars(ProcessGroup)) == before) == (comm.rank > 0)
    with pytest.raises(ZeroDivisionError):
        sync.step(lambda: 1 / 0)
    assert dict(vars(ProcessGroup)) == before
    assert StepWatch._tracing is None
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.slow
def test_foreign_messages_are_named(pool: Pool) -> None:
    said, *others = pool.run(many, fresh=True)
    assert others == [{name: [] for name in said}] * 3
    quiet = {"own", "barrier", "every step", "ddp, not averaging", "sharded"}
    assert {name for name, sentences in said.items() if not sentences} == quiet
    for name, call in (("sum", "all_reduce"), ("objects", "all_gather_object")):
        (sentence,) = said[name]
        assert sentence.startswith(
            "This script communicates at every step, which costs what local_sgd() saves: do so every few "
            f"steps, or inside averaged() ({call} at {__file__}:"
        )
    assert said["ddp"] == [DDP]
    assert said["same data"] == [
        "The workers were equal in rounds 0 and 1, although they had made steps: do they all train on the "
        "same batches, or does something else average their gradients?"
    ]


# What is said of real frameworks, and from which of their files.
TRAPS = [
    (DDP.removesuffix("."), ""),
    ("Accelerate reads every batch on rank 0 and sends it to the others, which costs what local_sgd() saves: "
     "set DataLoaderConfiguration(dispatch_batches=False)", "accelerate/utils/operations.py"),
    ("transformers gathers token counts at every step, which costs what local_sgd() saves: "
     "set average_tokens_across_devices=False", "accelerate/utils/operations.py"),
    ("Lightning broadcasts a SIGTERM flag before every batch, which costs what local_sgd() saves: use "
     "OffbeatStrategy of offbeat.integrations.lightning, which switches it off",
     "lightning/pytorch/loops/training_epoch_loop.py"),
    ("Lightning averages a logged value at every step, which costs what local_sgd() saves: call self.log "
     "with sync_dist=False", "lightning/fabric/utilities/distributed.py"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.xdist_group(frameworks.GROUP)
def test_the_traps_of_real_frameworks_are_named() -> None:
    """Among them the wrapper of Accelerate, whose `.module` was handed to Offbeat."""
    script = Path(__file__).with_name("traps.py")
    ran = frameworks.torchrun(2, str(script), "accelerate", "transformers", "lightning")
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if "local_sgd() saves" in line]
    assert len(said) == len(TRAPS), said
    for line, (sentence, file) in zip(said, TRAPS, strict=True):
        assert line.startswith(sentence)
        assert file in line


def beside(comm: offbeat.Communicator, way: str) -> list[str]:
    torch.manual_seed(comm.rank)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with heard() as said:
        sync = offbeat.local_sgd(model, optimizer, every=2, group=comm)

        def local() -> Tensor:
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            local()
            if way in ("before", "never"):
                optimizer.step()
            if way == "pair":
                sync.before_step()
                optimizer.step()
                sync.after_step()
            elif way == "closure":  # as Lightning does: the gradient is ready inside the optimizer's step
                optimizer.step(lambda: (local(), sync.before_step())[0])
                sync.after_step()
            elif way == "local":
                sync.step(optimizer.step)
            elif way != "never":
                sync.step()
            if way == "after":
                optimizer.step()
        sync.finish()
    return said


def test_a_second_step_is_noticed() -> None:
    def answers(way: str) -> list[list[str]]:
        return offbeat.simulate(lambda comm: beside(comm, way), 2)

    twice = (
        "optimizer.step() is called as well as sync.step(), which makes the step itself, so every gradient "
        "counts twice: remove optimizer.step(), or pass it as sync.step(optimizer.step)."
    )
    for way in ("before", "after"):
        assert answers(way)[0] == [twice]
    for way in ("right", "local", "pair", "closure"):
        assert answers(way) == [[], []]
    assert answers("never")[0] == [
        "finish(): optimizer.step() was called 3 times and sync.step() never, so every worker has trained "
        "alone and gets rank 0's weights now: call sync.step() in place of optimizer.step()."
    ]


def equal(comm: offbeat.Communicator, expression: str, lr: float) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with heard() as said:
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        for _ in range(10):
            model(torch.randn(4, 3)).square().mean().backward()
            sync.step()
            optimizer.zero_grad()
        sync.finish()
    return said


@pytest.mark.parametrize("workers", [2, 3])
def test_equal_workers_are_noticed(pool: Pool, workers: int) -> None:
    """A mean of three equal numbers may differ from them by its rounding."""
    for expression, lr, often in (
        ("local_sgd(every=2)", 0.1, 1),
        ("ddp()", 0.1, 0),
        ("local_sgd(every=2)", 0.0, 0),
    ):
        first, *others = pool.run(equal, expression, lr, workers=workers)
        assert len(first) == often
        assert others == [[]] * (workers - 1)
    assert offbeat.simulate(lambda comm: equal(comm, "local_sgd(every=2)", 0.1), workers) == [[]] * workers
