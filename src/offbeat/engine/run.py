"""What a synchronizer offers beside its steps: costs, metrics, still optimizers, and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from offbeat.base.clock import State
from offbeat.comm.communicator import Metered
from offbeat.engine import saving
from offbeat.engine.optimizers import replace_steps
from offbeat.engine.part import Part
from offbeat.engine.report import Costs, Report, Totals


class Savable(Protocol):
    """Anything that a checkpoint can hold, such as a scheduler or a scaler."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> Any: ...


class Run(ABC):
    """The calls of a synchronizer that are no part of a step."""

    parts: list[Part]
    model: nn.Module
    optimizers: list[Optimizer]
    steps: int
    _comm: Metered
    _costs: Costs

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...

    @abstractmethod
    def _failing(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _stepped(self, optimizer: Optimizer) -> None: ...

    @property
    def reports(self) -> list[Report]:
        """The reports of the last 1 000 rounds. Waits for the drift of the last one."""
        self._costs.flush(self.parts)
        return list(self._costs.reports)

    @property
    def totals(self) -> Totals:
        """The cost of the run so far, on this worker."""
        self._costs.flush(self.parts)
        return self._costs.totals

    def metrics(self) -> dict[str, float]:
        """Return the costs so far and the last round as numbers, for loggers. Sends nothing and never waits.

        Names begin with `offbeat/`. What is not known yet, such as the drift before the first report, is left
        out. Mean and maximum over the workers are those that the last round brought along.
        """
        self._costs.count_outside(self.parts)
        own = self._costs.metrics() | {"step": self.steps, "workers": self._comm.size}
        return {f"offbeat/{name}": float(value) for name, value in own.items()}

    def still(self) -> AbstractContextManager[None]:
        """Inside, `step()` of the optimizers runs its closure and changes nothing.

        For frameworks that own the step, when `before_step()` has returned False. The method takes the
        gradients as they are in that call, so they may be clipped before.
        """
        return replace_steps(self.optimizers, self._stepped)

    def save(self, folder: str | Path, **others: Savable) -> None:
        """Write this rank's file of a checkpoint. Every rank calls it after the same step.

        It holds weights, buffers, optimizers, this synchronizer, the random states of Python, NumPy and
        torch, and the states of `others`, such as a scheduler. Older checkpoints in the folder are deleted
        once every rank has written its file.
        """
        state = {"sync": self.state_dict(), **saving.capture(self.model, self.optimizers)}
        state["others"] = {name: other.state_dict() for name, other in others.items()}
        with self._costs.including(self._comm):
            saving.Folder(folder, self._comm, self.model).write(self.steps, state)

    def load(self, folder: str | Path, **others: Savable) -> bool:
        """Continue from the newest checkpoint that is whole on every rank. Return whether there is one.

        Every rank calls it. An incomplete checkpoint is ignored with a warning. `CheckpointMismatch` is
        raised for one of another method, model or number of workers, and if the only one is damaged.
        """
        place = saving.Folder(folder, self._comm, self.model)
        with self._costs.including(self._comm):
            step = place.newest()
        if step is None:
            return False
        with self._failing():
            state = place.read(step)
        self.load_state_dict(state["sync"])
        with self._failing():
            saving.check(state, others, self.model, self.optimizers)
            saving.restore(state, self.model, self.optimizers)
            for name, other in others.items():
                other.load_state_dict(state["others"][name])
        return True
