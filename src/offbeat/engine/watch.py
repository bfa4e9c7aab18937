"""Warnings in the first steps about what defeats a method: other messages, double steps, equal workers."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

from offbeat.base.tensors import Gradients, local, trainable
from offbeat.comm.communicator import Communicator, Wrapped
from offbeat.comm.torch_backend import Torch
from offbeat.engine.optimizers import WITHOUT_DDP
from offbeat.engine.report import Report, logger

if TYPE_CHECKING:
    from offbeat.engine.synchronizer import Synchronizer

STEPS, ENOUGH, NAMED = 12, 10, 3  # steps counted, those that must be suspicious, and steps traced
ROUNDS = 4  # rounds whose drift is checked
_CALLS = re.compile("_?(all|barrier|broadcast|gather|monitored|recv|reduce|scatter|send)")
_TORCH, _OFFBEAT = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)

# Known calls: a part of the file name, the function, who makes the call, and what to do.
_KNOWN = (
    ("transformers/trainer", "_get_num_items_in_batch|get_batch_samples",
     "transformers gathers token counts at every step", "set average_tokens_across_devices=False"),
    ("lightning/pytorch/loops", "_broadcast_sigterm_tensor",
     "Lightning broadcasts a SIGTERM flag before every batch",
     "use OffbeatStrategy of offbeat.integrations.lightning, which switches it off"),
    ("logger_connector/result", ".*",
     "Lightning averages a logged value at every step", "call self.log with sync_dist=False"),
    ("accelerate/data_loader", "_fetch_batches|__iter__",
     "Accelerate reads every batch on rank 0 and sends it to the others",
     "set DataLoaderConfiguration(dispatch_batches=False)"),
)  # fmt: skip
_HIDDEN = (
    "Something communicates at every step without going through Python",
    "look for DistributedDataParallel and for torch's functional collectives",
)
_UNKNOWN = ("This script communicates at every step", "do so every few steps, or inside averaged()")


class StepWatch:
    """Watches the first steps of a run for messages that Offbeat did not send, and for double steps.

    Messages are counted by the sequence numbers of the process groups that connect workers, at no cost. Only
    if nearly every step has some, calls are traced for a few steps.
    """

    _tracing: StepWatch | None = None  # the one that has replaced the calls of ProcessGroup

    def __init__(self, sync: Synchronizer, comm: Communicator) -> None:
        while isinstance(comm, Wrapped):
            comm = comm.comm
        self.real, self._speaks = isinstance(comm, Torch), comm.rank == 0  # and no simulation
        self._ranks = frozenset(comm.ranks) if isinstance(comm, Torch) and comm.rank == 0 else frozenset()
        self._looks = self._sent = self._hits = self._beside = self._streak = self._traced = 0
        self._calls: Counter[tuple[str, str, tuple[str, str]]] = Counter()
        self._replaced: dict[str, Any] = {}
        own = weakref.ref(sync)

        def stepped(*_: object) -> None:
            if (run := own()) is not None and not run._inside_step:
                self._beside += 1

        # A wrapper that is an Optimizer only by name, such as that of Accelerate, has no hooks.
        real = [o for o in sync.optimizers if "_optimizer_step_post_hooks" in vars(o)]
        self._hooks = [optimizer.register_step_post_hook(stepped) for optimizer in real]

    def check(self, sync: Synchronizer) -> StepWatch | None:
        """A step begins. Return None when the watch is over."""
        self._check_double_steps()
        before, self._sent, self._looks = self._sent, self._count(), self._looks + 1
        self._hits += self._looks > 1 and self._sent > before
        if self._looks <= STEPS:
            return self
        if not self._replaced:
            # A method that communicates at every step anyway has little to lose.
            if (
                self._hits >= ENOUGH
                and 4 * sync._costs.totals.rounds < 3 * STEPS
                and StepWatch._tracing is None
            ):
                self._trace()
                return self
        elif (traced := self._looks - self._traced) <= NAMED:
            return self
        else:
            self._warn(sync, traced)
        self.close()
        return None

    def skip_sent(self) -> None:
        """Do not count what was sent until now."""
        self._sent = self._count()

    def finish(self, steps: int, workers: int) -> None:
        """The run ends."""
        self.close()
        if self._speaks and steps == 0 < self._beside and workers > 1:
            logger.warning(
                "finish(): optimizer.step() was called %d times and sync.step() never, so every worker has "
                "trained alone and gets rank 0's weights now: call sync.step() in place of optimizer.step().",
                self._beside,
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for name, own in self._replaced.items():
            setattr(ProcessGroup, name, own)
        self._replaced = {}
        if StepWatch._tracing is self:
            StepWatch._tracing = None

    def _check_double_steps(self) -> None:
        beside, self._beside = self._beside, 0
        self._streak = self._streak + 1 if beside and self._looks else 0
        if self._streak == 2 and self._speaks:
            logger.warning(
                "optimizer.step() is called as well as sync.step(), which makes the step itself, so every "
                "gradient counts twice: remove optimizer.step(), or pass it as sync.step(optimizer.step)."
            )

    def _connects(self, ranks: Any) -> bool:
        return len(self._ranks.intersection(ranks)) > 1

    def _count(self) -> int:
        """Return how many messages the groups that connect workers have carried."""
        groups = [
            group
            for group, ranks in _world.pg_group_ranks.items()
            if isinstance(group, ProcessGroup) and self._connects(ranks)
        ]
        try:
            return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]
        except RuntimeError:  # a backend that does not number them
            return 0

    def _trace(self) -> None:
        StepWatch._tracing, self._traced = self, self._looks
        for name, own in list(vars(ProcessGroup).items()):
            if _CALLS.match(name) and callable(own):
                self._replaced[name] = own
                setattr(ProcessGroup, name, self._traced_call(name, own))

    def _traced_call(self, name: str, own: Any) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            if self._connects(_world.pg_group_ranks.get(group, ())):
                self._calls[describe_call(name, sys._getframe(1))] += 1
            return own.__get__(group)(*args, **options)

        return call

    def _warn(self, sync: Synchronizer, steps: int) -> None:
        """Name each cause once: a DDP wrapper, whose messages do not go through Python, and traced calls."""
        named: dict[tuple[str, str], str] = {}
        if find_ddp(sync.model):
            named["DistributedDataParallel averages every gradient", WITHOUT_DDP] = ""
            sync._drift_watch = None  # would say the same
        for (call, place, known), often in self._calls.most_common():
            if often >= steps - 1:
                named.setdefault(known, f" ({call} at {place})")
        for (what, remedy), where in (named or {_HIDDEN: ""}).items():
            logger.warning("%s, which costs what %r saves: %s%s.", what, sync, remedy, where)


def describe_call(name: str, frame: FrameType | None) -> tuple[str, str, tuple[str, str]]:
    """Return the call, its place outside of torch and Offbeat, and the known cause and remedy."""
    place, known = "an unknown place", _UNKNOWN
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if place == "an unknown place":
            if file.endswith("distributed_c10d.py"):
                name = function
            if not file.startswith((_TORCH, _OFFBEAT)):
                place = f"{file}:{frame.f_lineno}"
        for part, pattern, what, remedy in _KNOWN:
            if known is _UNKNOWN and part in file and re.fullmatch(pattern, function):
                known = (what, remedy)
        frame = frame.f_back
    return name, place, known


def find_ddp(model: nn.Module) -> bool:
    """Whether a DDP wrapper averages gradients of this model."""
    own = {id(p) for p in model.parameters()}
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return any(
        wrapper.require_backward_grad_sync and any(id(p) in own for p in wrapper.parameters())
        for wrapper in wrappers
    )


class DriftWatch:
    """Watches the first rounds for workers that stay equal although they train."""

    def __init__(self) -> None:
        self._rounds = self._equal = 0

    def check(self, report: Report, sync: Synchronizer) -> DriftWatch | None:
        """A round was reported. Return None when the watch is over."""
        self._rounds += 1
        stood = report.period == 0 or report.workers == 1 or sync._lr == 0
        if report.drift is not None:
            self._equal = 0 if stood or not is_zero(report.drift, sync.model) else self._equal + 1
        if self._equal == 2:
            self._warn(report, sync)
        return self if self._rounds < ROUNDS and self._equal < 2 else None

    def _warn(self, report: Report, sync: Synchronizer) -> None:
        if sync._comm.rank > 0 or any(isinstance(vars(p).get("live"), Gradients) for p in sync.parts):
            return
        wrapped = find_ddp(sync.model)
        logger.warning(
            "The workers were equal in rounds %d and %d, although they had made steps: %s",
            report.round - 1, report.round,
            f"DistributedDataParallel averages every gradient; {WITHOUT_DDP}." if wrapped else
            "do they all train on the same batches, or does something else average their gradients?",
        )  # fmt: skip


def is_zero(drift: float, model: nn.Module) -> bool:
    """Whether a drift is 0, or no larger than the rounding of the mean of equal weights."""
    weights = [local(p) for p in trainable(model).values()]
    if drift == 0 or any(torch.finfo(weight.dtype).eps > 1e-6 for weight in weights):
        return drift == 0
    lengths = [float(weight.square().sum(dtype=torch.float64)) for weight in weights]
    return drift <= sum(lengths) * torch.finfo(torch.float32).eps ** 2
