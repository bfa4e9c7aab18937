"""Stages with a proximal pull. At the end of each, the weights become their mean over the stage (CoDA)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.among import Group, World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import local, trainable
from offbeat.comm.communicator import Communicator, Metered
from offbeat.engine.agreement import copy_state
from offbeat.engine.auc import AUCLoss
from offbeat.engine.optimizers import read_rates, scale_steps
from offbeat.engine.part import Landing, Part
from offbeat.engine.report import Emit
from offbeat.engine.round import Round


class Stages(Part):
    """Pulls the weights toward those at the beginning of the stage, and averages over the stage at its end.

    `offbeat.coda` states the rule. `lengths` are the numbers of steps of the stages; the last one does not
    end. A single number is the length of the first stage, and each next one is `decay` times as long. The
    first iteration of a later stage makes no step: its batch gives the new alpha of the model's `AUCLoss`.
    """

    unshared = "each worker sums up its own weights over a stage"

    def __init__(
        self,
        model: nn.Module,
        lengths: int | Sequence[int],
        *,
        gamma: float,
        decay: float = 3.0,
        among: Group = None,
    ) -> None:
        self.model, self.peers, self.gamma, self.decay = model, World(among), gamma, decay
        self.lengths = tuple(lengths) if isinstance(lengths, list | tuple) else lengths
        self._check()
        self._loss = find_loss(model)
        dual = None if self._loss is None else self._loss.alpha
        primal = {name: p for name, p in trainable(model).items() if p is not dual}
        self._names, self._parameters = tuple(primal), list(primal.values())
        self._optimizers: Sequence[Optimizer] = ()
        self._scaled, self._rates = ExitStack(), tuple[float, ...]()
        self._index, self._agreed, self._began = 0, False, 0
        self.stage, self.done = 0, 0  # steps done in the stage; -1: first estimate alpha
        self._reference: Packed | None = None  # where the stage began
        self._sum = Packed.like({})  # of the weights after each of its steps, in float64

    def __repr__(self) -> str:
        return f"Stages({self.lengths}, gamma={self.gamma}, decay={self.decay})"

    def _check(self) -> None:
        lengths = self.lengths if isinstance(self.lengths, tuple) else (self.lengths,)
        if not lengths or not all(is_whole(n, 1) for n in lengths):
            raise ValueError(f"{self!r}: stages must be whole numbers of steps, at least 1.")
        if not self.gamma > 0:
            raise ValueError(f"{self!r}: gamma must be a positive number.")
        if not self.decay >= 1:
            raise ValueError(f"{self!r}: decay must be at least 1.")

    def length(self, stage: int) -> int | None:
        """Return the number of steps of a stage; None if it does not end."""
        if isinstance(self.lengths, int):
            return round(self.lengths * self.decay**stage)
        return self.lengths[stage] if stage + 1 < len(self.lengths) else None

    def bind(self, index: int, optimizers: Sequence[Optimizer], report: Emit) -> None:
        self._index, self._optimizers, self._emit = index, optimizers, report

    def communicators(self) -> list[Communicator]:
        """Also agree on the share of positives, once: the mean over the workers."""
        everyone = self.peers.everyone
        if self.outside is None:
            self.outside = Metered(everyone)
        if self._loss is not None and not self._agreed:
            given = self.outside.gather(torch.tensor([self._loss.ratio], dtype=torch.float64)).wait()
            self._loss.ratio = torch.stack(given).mean().item()
        self._agreed = True
        return [everyone]

    @torch.no_grad()
    def plan(self, clock: Clock) -> None:
        if self._reference is None:
            self._allocate()
            self._begin(clock)

    def _allocate(self) -> Packed:
        like = dict(zip(self._names, self._live(), strict=True))
        self._reference = reference = Packed.like(like)
        # A stage may have 100 000 steps; in float32 their sum would be off by 4e-4.
        wide = [torch.promote_types(flat.dtype, torch.float64) for flat in reference.flats]
        pairs = zip(reference.flats, wide, strict=True)
        self._sum = reference.over([torch.zeros_like(flat, dtype=dtype) for flat, dtype in pairs])
        return reference

    def _begin(self, clock: Clock) -> None:
        """A stage begins at the live weights."""
        assert self._reference is not None
        self._reference.read(self._live())
        self._sum.scale(0.0)
        self._began = clock.step

    def _live(self) -> list[Tensor]:
        return [local(p) for p in self._parameters]

    @torch.no_grad()
    def before(self, clock: Clock) -> bool:
        """Divide the rates of the optimizers' own steps until `release`, or estimate alpha without a step."""
        if self.done < 0:
            self._estimate()
            return False
        divisor = self.decay**self.stage
        self._rates = tuple(lr / divisor for lr in read_rates(self._optimizers, self._parameters)[1])
        for optimizer in self._optimizers:
            self._scaled.enter_context(scale_steps(optimizer, divisor))
        return True

    def release(self) -> None:
        self._scaled.close()

    def _estimate(self) -> None:
        """alpha ← mean score of the negatives − mean score of the positives, over all workers' batches."""
        if self._loss is None:
            return
        assert self.outside is not None
        sums = torch.stack(self.outside.gather(self._loss.take()).wait()).sum(dim=0).tolist()
        if sums[1] and sums[3]:  # without one of the classes alpha stays
            self._loss.alpha.fill_(sums[2] / sums[3] - sums[0] / sums[1])

    @torch.no_grad()
    def after(self, clock: Clock) -> Landing | None:
        if self._loss is not None:
            self._loss.take()
        self.done += 1
        if self.done == 0:
            return None
        assert self._reference is not None
        for x, start, total, lr in zip(
            self._live(), self._reference.views, self._sum.views, self._rates, strict=True
        ):
            x.lerp_(start.to(x.dtype), lr / (lr + self.gamma))
            total.add_(x)
        if self.done != self.length(self.stage):
            return None
        self._end(clock)
        return Landing(frozenset(self._names), float("inf"))

    def _end(self, clock: Clock) -> None:
        """The weights become their mean over the steps of the stage and over the workers."""
        comm, mean = self.peers.everyone, self._reference
        assert mean is not None
        self._sum.scale(1 / self.done)
        torch._foreach_copy_(mean.flats, self._sum.flats)
        round = Round(replace(clock, round=self.stage, workers=comm.size), comm, since=self._began)
        with round.phase("offbeat.stage"):
            round.compare(self._index, read_rates(self._optimizers)[0], comm.rank)
            round.messages.append(round.comm.mean(mean.flats))
            round.wait()
        mean.write(self._live())
        self._emit(round.report())
        self.stage, self.done = self.stage + 1, -1
        self._begin(clock)

    def state_dict(self) -> State:
        place = {"stage": self.stage, "done": self.done, "began": self._began}
        begun = None if self._reference is None else self._reference.flats
        return {**place, "reference": copy_state(begun), "sum": copy_state(self._sum.flats)}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        self.stage, self.done, self._began = state["stage"], state["done"], state["began"]
        self._reference = None
        if state["reference"] is not None:
            reference = self._allocate()
            torch._foreach_copy_(reference.flats, state["reference"])
            torch._foreach_copy_(self._sum.flats, state["sum"])


def find_loss(model: nn.Module) -> AUCLoss | None:
    """Return the model's `AUCLoss`, if it has one. Raise if it has several."""
    found = [module for module in model.modules() if isinstance(module, AUCLoss)]
    if len(found) > 1:
        raise ValueError(f"Stages(model, ...): the model has {len(found)} AUCLoss modules: keep one.")
    return found[0] if found else None
