"""The calls of a synchronizer besides its steps: costs, metrics, checkpoints, and workers without data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.base.clock import State
from offbeat.base.tensors import local
from offbeat.comm.communicator import Communicator, Metered
from offbeat.comm.presence import Departure, Track
from offbeat.engine import dry, reach, saving
from offbeat.engine.exchange import Exchange
from offbeat.engine.export import check_path, write_model
from offbeat.engine.headers import LOAD, SAVE
from offbeat.engine.loading import Loaded
from offbeat.engine.optimizers import replace_steps
from offbeat.engine.part import Part, hold_gradients, paused
from offbeat.engine.report import Costs, Report, Totals, logger
from offbeat.engine.transfer import why_unshared

if TYPE_CHECKING:
    from offbeat.engine.commits import Commits
    from offbeat.engine.watch import StepWatch

T = TypeVar("T")


class Savable(Protocol):
    """Anything that a checkpoint can hold, such as a scheduler or a scaler."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> Any: ...


class Run(ABC):
    """The calls of a synchronizer besides its steps, which `Synchronizer` adds."""

    method: str
    parts: list[Part]
    model: nn.Module
    optimizers: list[Optimizer]
    steps: int
    finished: bool
    _inside_step: bool
    _inside_averaged: bool
    _comm: Metered
    _costs: Costs
    _timed: bool
    _loaded: Loaded | None
    _lr: float
    _run: int
    _started: bool
    _track: Track
    _watch: StepWatch | None
    _commits: Commits | None
    _releasing: list[Part]
    on_join: Callable[[Any], None] | None  # called when this worker has received the others' state

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State, *, resize: bool = False) -> None: ...

    @abstractmethod
    def averaged(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def agree(self, method: str | None = None) -> None: ...

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _meet(self, kind: int) -> None: ...

    @abstractmethod
    def _before(self, samples: float | None, *, dry: bool = False) -> bool: ...

    @abstractmethod
    def _after(self) -> None: ...

    @abstractmethod
    def _stepped(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    def __repr__(self) -> str:
        return self.method

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish() if error is None else self._leave(error)

    def _must_be_open(self, call: str, *, finished: bool = False) -> None:
        """Raise inside averaged() or a step, and after `finish()` unless `finished` is allowed."""
        if self.finished and not finished:
            raise RuntimeError(f"{call}: this run was ended by finish(): make a new synchronizer.")
        if self._inside_averaged:
            raise RuntimeError(f"{call}: leave averaged() first: inside, the model has other weights.")
        if self._inside_step:
            raise RuntimeError(f"{call}: a step is under way: call after_step() first.")

    def accumulate(self) -> AbstractContextManager[None]:
        """For all backward passes of a step but the last: inside, gradients add up and are not sent."""
        return hold_gradients(self.parts)

    @property
    def rounds(self) -> int:
        """The number of rounds of the method's last exchange that have landed."""
        last = [part for part in self.parts if isinstance(part, Exchange)][-1:]
        return sum(part.rhythm.round - part.rhythm.in_air for part in last)

    @property
    def _place(self) -> int:
        """The step after which all workers meet, or the round if rounds follow the clock."""
        return self.rounds if self._timed else self.steps

    def join(self, each: Callable[[], object] | None = None) -> None:
        """This worker has no more data: take part in the rounds of the others until all are done.

        It makes no steps of its own and does not count in these rounds, but applies their results. `each` is
        called after every step, like the rest of the loop: a learning-rate scheduler, an evaluation.
        """
        self._must_be_open("join()")
        dry.check_dry(self.parts, "join()")
        over = False
        while not over:
            for parameter in self.model.parameters():
                parameter.grad = None
            with self._failing():
                self._before(None, dry=True)
                for optimizer in self.optimizers if dry.takes_mean(self.parts, self.steps + 1) else ():
                    optimizer.step()
                self._after()
            over = dry.are_all_dry(self.parts)
            if each is not None:
                each()
        dry.revive(self.parts, self.steps)

    def batches(self, loader: Iterable[T], each: Callable[[], object] | None = None) -> Iterator[T]:
        """Yield the batches of a loader, then `join()`: the loop ends when all workers are done.

        for x, y in sync.batches(loader):
            loss(model(x), y).backward()
            sync.step()
            optimizer.zero_grad()
        """
        dry.check_dry(self.parts, "batches()")
        yield from dry.check_loader(loader)
        self.join(each)

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
        out. Mean and maximum over the workers come from the last round.
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
        self._must_be_open("save()", finished=True)
        with self._failing(), paused(self.parts):
            self._start()
            self._together(lambda: self._meet(SAVE))
            if self._commits is not None:
                self._commits.meetings.settle()
        state = saving.capture(self, others)
        with paused(self.parts):
            self._together(lambda: saving.Folder(folder, self._comm, self.model).write(self.steps, state))

    def load(self, folder: str | Path, *, resize: bool = False, **others: Savable) -> bool:
        """Continue from the newest checkpoint that is whole on every rank. Return whether there is one.

        Every rank calls it. An incomplete checkpoint is ignored with a warning. `CheckpointMismatch` is
        raised for one of another method, model or number of workers, and if the only one is damaged.

        With `resize`, the checkpoint may be of another number of workers. Rank r then takes the optimizers
        and `others` of rank r modulo that number. All weights become the consensus of all files in reach.
        """
        self._must_be_open("load()")
        place = saving.Folder(folder, self._comm, self.model)
        with self._costs.including(self._comm):
            with self._failing():
                self.agree()
                self._meet(LOAD)
            found = reach.find(place, resize=resize, unshared=why_unshared(self.parts))
        if found is None:
            return False
        step, workers, own, counted = found
        with paused(self.parts):
            with self._failing():
                state = place.read(step, own, workers)
            saving.restore(self, state, others, resize=resize)
            if self._loaded is not None and self._loaded.ranks is not None:
                with self._failing():
                    models = [(state if r == own else place.read(step, r, workers))["model"] for r in counted]
                self._count_weights(models)
        return True

    def _count_weights(self, models: Sequence[Mapping[str, Tensor]]) -> None:
        """After `load_state_dict(..., resize=True)`: make the weights of all workers the consensus now.

        `models` are weights and buffers of old workers that this rank has read, with the names and shapes of
        this model. Together, the ranks pass those of every old worker once. Every rank calls it.
        """
        self._must_be_open("_count_weights()")
        with self._failing():
            if self._loaded is not None:
                self._loaded.weights = [{n: local(t) for n, t in model.items()} for model in models]
            self._start()

    def export(self, path: str | Path) -> None:
        """Write one file with the consensus of all workers, as `averaged()` shows it. Every rank calls it.

        The suffix is `.safetensors`, which needs that package, or `.pt` for `torch.load`.
        """
        path = check_path(path)
        with self.averaged(), self._failing():
            write_model(path, self.model, self._comm)

    def _together(self, call: Callable[[], T], restore: Callable[[], None] | None = None, **more: bool) -> T:
        """Make a call in which all workers meet. In an elastic run, those that remain repeat it."""
        with self._costs.including(self._comm):
            return call() if self._commits is None else self._commits.meetings.make(call, restore, **more)

    def _close(self, *, finished: bool = False) -> None:
        if self._commits is not None:
            self._commits.close(finished=finished)

    def _follow_members(self, everyone: Communicator) -> None:
        self._comm.rank, self._comm.size, self._track.rank = everyone.rank, everyone.size, everyone.rank

    def _drop_gradients(self) -> None:
        """If this worker has just joined: its gradients belong to weights that it no longer has."""
        if self._commits is not None and self._commits.joined:
            self._commits.joined = False
            logger.info("The gradients of step %d are dropped: this worker has just joined.", self.steps + 1)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def _leave(self, error: BaseException) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for part in self._releasing:
            part.release()
        for part in self.parts:
            part.leave(Departure.of(error))
        self._close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """On an error inside, undo temporary changes and tell the other workers that this one leaves."""
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise
