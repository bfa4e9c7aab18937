"""Offbeat inside accelerate: a `LocalSGD` with the signature of accelerate's own, for every method."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.base.errors import how_to_install
from offbeat.engine.synchronizer import Synchronizer
from offbeat.integrations.optimizers import check_steps
from offbeat.methods.expression import method as parse

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    needed = f"offbeat.integrations.accelerate needs accelerate: {how_to_install('accelerate')}"
    raise ImportError(needed) from error


class LocalSGD:
    """Trains `model` with few rounds of communication: change one import of a script for accelerate.

        - from accelerate.local_sgd import LocalSGD
        + from offbeat.integrations.accelerate import LocalSGD

    Call `step()` after every `optimizer.step()`. Leaving the block gives all workers the same weights.
    `method` is any expression of Offbeat, such as "diloco(every=64)"; without it, the method is
    `local_sgd(every=local_sgd_steps)`. `sync` is the synchronizer, inside the block; None if not `enabled`,
    or if there is only one process.

    Differs from accelerate's: steps are counted in updates, not in batches that are accumulated. Buffers are
    averaged as well. Parameters keep their memory.
    """

    sync: Synchronizer | None = None

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int | None = None,
        enabled: bool = True,
        *,
        method: str | None = None,
    ) -> None:
        if (local_sgd_steps is None) == (method is None):
            raise ValueError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps!r}, method={method!r}): pass one of the two."
            )
        self.accelerator, self.model = accelerator, model
        self.method = parse(f"local_sgd(every={local_sgd_steps!r})" if method is None else method)
        check_accelerator(accelerator, "LocalSGD", "Accelerator(cpu=True)")
        self.enabled = enabled and accelerator.distributed_type != DistributedType.NO
        self._closing = ExitStack()
        self._losses: list[Tensor] = []  # of the batches of the coming update, each with its weight
        self._stepped: list[AcceleratedOptimizer] = []  # in this update
        self._theirs: bool | None = None  # whether the optimizers step in this update; None before it begins

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            optimizers = self._find_optimizers(model)
            self.sync = self.method(model, [optimizer.optimizer for optimizer in optimizers])
            put = self._closing.enter_context
            put(self.sync)
            self.sync.start()
            put(getattr(self.model, "no_sync", nullcontext)())  # a model wrapped in DDP sends nothing
            put(replaced(self.accelerator, "backward", self._backward))
            put(replaced(self.accelerator, "unscale_gradients", self._unscale))
            for optimizer in optimizers:
                put(replaced(optimizer, "step", partial(self._step, optimizer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def step(self) -> None:
        """Complete an update: the parameters have moved. While batches are accumulated, do nothing."""
        if self.sync is None or not self.accelerator.sync_gradients:
            return
        if not self._stepped:
            raise RuntimeError(
                "LocalSGD.step(): no optimizer has stepped: first call step() of the optimizer that "
                "accelerator.prepare() returned."
            )
        self._stepped, self._theirs, self._losses = [], None, []
        self.sync.after_step()

    def _find_optimizers(self, model: nn.Module) -> list[AcceleratedOptimizer]:
        own = {id(p) for p in model.parameters()}
        found = [
            optimizer
            for optimizer in self.accelerator._optimizers
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        ]
        if not found:
            raise ValueError("LocalSGD: no optimizer trains this model: pass it to accelerator.prepare().")
        check_steps(optimizer.optimizer for optimizer in found)
        return found

    def _backward(self, own: Callable[..., None], loss: Tensor, **options: Any) -> None:
        assert self.sync is not None
        last = self.accelerator.sync_gradients
        with nullcontext() if last else self.sync.accumulate():
            own(loss, **options)
        self._losses.append(loss.detach() / self.accelerator.gradient_accumulation_steps)

    def _unscale(self, own: Callable[..., None], *args: Any, **options: Any) -> None:
        """Clipping starts with this call: gradients are exchanged before they are unscaled and clipped."""
        if self.accelerator.sync_gradients:
            self._begin()
        own(*args, **options)

    def _begin(self) -> bool:
        """Begin an update, once. Return whether the optimizers step."""
        assert self.sync is not None
        if self._theirs is None:
            if self._losses:
                self.sync.observe(torch.stack(self._losses).sum())
            self._theirs = self.sync.before_step()
        return self._theirs

    def _step(
        self,
        optimizer: AcceleratedOptimizer,
        own: Callable[..., None],
        closure: Callable[[], Any] | None = None,
    ) -> None:
        assert self.sync is not None
        if not self.accelerator.sync_gradients:
            own(closure)  # does nothing, but schedulers check for it
            return
        if optimizer in self._stepped:
            raise RuntimeError("LocalSGD: call its step() after every optimizer.step().")
        self._stepped.append(optimizer)
        theirs = self._begin()
        if not theirs and optimizer.scaler is not None:
            raise ValueError(f"{self.method} makes the step itself, which fp16 may have to skip: use bf16.")
        with nullcontext() if theirs else self.sync.still():
            own(closure)


@contextmanager
def replaced(thing: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Inside, `thing.name(...)` calls `new(own, ...)`, where `own` is the original."""
    own, before = getattr(thing, name), vars(thing).get(name)
    vars(thing)[name] = wraps(own)(lambda *args, **options: new(own, *args, **options))
    try:
        yield
    finally:
        del vars(thing)[name]
        if before is not None:
            vars(thing)[name] = before


def check_accelerator(accelerator: Accelerator, call: str, remedy: str) -> None:
    """Raise if accelerate would let each process train alone, or splits the model itself."""
    launched, kind = int(os.environ.get("WORLD_SIZE", "1")), accelerator.distributed_type
    if accelerator.num_processes == 1 < launched:
        raise ValueError(
            f"{call}: {launched} processes were launched, but accelerate sees no accelerator, so that each "
            f"would train alone: pass {remedy} to train on CPUs."
        )
    foreign = [] if kind == DistributedType.NO or kind.name.startswith("MULTI_") else [kind.name]
    plugins = ("DEEPSPEED", "FSDP", "MEGATRON_LM")  # on CPUs, accelerate ignores them
    foreign += [name for name in plugins if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
    if foreign:
        raise refuse_both(call, foreign[0])


def refuse_both(call: str, name: str) -> ValueError:
    """Return the error for another framework that distributes the model."""
    return ValueError(f"{call} with {name}: both distribute the model; switch off {name}.")
