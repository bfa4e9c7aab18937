"""What works against a method is said once, with its place; what does not is never said."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

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

STEPS = 20
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


# Where frameworks communicate at every step.
KNOWN = {
    "transformers": ("transformers/trainer.py", "_get_num_items_in_batch"),
    "lightning": ("lightning/pytorch/loops/training_epoch_loop.py", "_broadcast_sigterm_tensor"),
    "accelerate": ("accelerate/data_loader.py", "_fetch_batches"),
}


@pytest.mark.parametrize("framework", KNOWN)
def test_the_known_calls_are_still_there(framework: str) -> None:
    file, function = KNOWN[framework]
    spec = importlib.util.find_spec(framework)
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent.parent / file).read_text()
    assert f"    def {function}(self" in text


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
    for name, (file, function) in KNOWN.items():
        call = f"def {function}():\n    all_reduce(one)\n"
        scope = {"all_reduce": all_reduce, "one": torch.ones(1)}
        exec(compile(call, f"/site-packages/{file}", "exec"), scope)
        said[name] = train(comm, linear(), lambda step, call=scope[function]: call())
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
    return said


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
    remedies = {
        "transformers": "transformers gathers token counts at every step, which costs what local_sgd() "
        "saves: set average_tokens_across_devices=False",
        "lightning": "Lightning broadcasts a SIGTERM flag before every batch, which costs what local_sgd() "
        "saves: use OffbeatStrategy of offbeat.integrations.lightning, which switches it off",
        "accelerate": "Accelerate reads every batch on rank 0 and sends it to the others, which costs what "
        "local_sgd() saves: set DataLoaderConfiguration(dispatch_batches=False)",
    }
    for name, sentence in remedies.items():
        assert said[name] == [f"{sentence} (all_reduce at /site-packages/{KNOWN[name][0]}:2)."]
    assert said["ddp"] == [
        "DistributedDataParallel averages every gradient, which costs what local_sgd() saves: train the "
        "model itself, without the wrapper (in Accelerate, prepare_model(model, evaluation_mode=True); in "
        "transformers, OffbeatTrainer; in Lightning, OffbeatStrategy)."
    ]
    assert said["same data"] == [
        "The workers were equal in rounds 0 and 1, although they had made steps: do they all train on the "
        "same batches, or does something else average their gradients?"
    ]


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
        "optimizer.step() is called beside sync.step(), which makes the step itself, so every gradient "
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


@pytest.mark.parametrize("workers", [2, 3])
def test_equal_workers_are_noticed(workers: int) -> None:
    """A mean of three equal numbers may differ from them by its rounding."""

    def worker(comm: offbeat.Communicator, expression: str, lr: float) -> list[str]:
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

    def sentences(expression: str, lr: float = 0.1) -> list[str]:
        said = offbeat.simulate(lambda comm: worker(comm, expression, lr), workers)
        assert all(len(before) >= len(after) for before, after in pairwise(said))
        return said[0]

    assert len(sentences("local_sgd(every=2)")) == 1
    assert sentences("ddp()") == []
    assert sentences("local_sgd(every=2)", lr=0.0) == []
