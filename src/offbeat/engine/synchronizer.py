"""The driver: it stands where the optimizer's step stood."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.clock import Clock, State
from offbeat.base.tensors import named, trainable
from offbeat.comm.communicator import Metered
from offbeat.comm.presence import Departure, Track
from offbeat.engine import checkpoint
from offbeat.engine import handshake as agreement
from offbeat.engine.extras import floating_buffers
from offbeat.engine.optimizers import check_fit, held_still, learning_rate, listed, mark
from offbeat.engine.part import Part
from offbeat.engine.report import Report, Totals
from offbeat.engine.weights import put_aside, replace_by_mean, take_from_first, write

logger = logging.getLogger("offbeat")


class Synchronizer:
    """Drives the parts of a method around the local step.

    `steps` counts the iterations completed. `on_report` is called with every `Report`.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        parts: Sequence[Part],
        *,
        on_report: Callable[[Report], None] | None = None,
    ) -> None:
        self.optimizers = listed(optimizer)
        self.parts = list(parts)
        if not self.parts:
            raise ValueError("Synchronizer(optimizer, []): at least one part is needed.")
        self.on_report = on_report
        self.method = agreement.without_addresses(f"Synchronizer({self.parts!r})")
        self.model = self.parts[0].model
        self.steps = 0
        self.finished = False
        if any(part.model is not self.model for part in self.parts):
            raise ValueError("Synchronizer(...): all parts must be of one model.")
        _check_order(self.parts)
        check_fit(self.optimizers, self.model)
        self._lr = learning_rate(self.optimizers)
        self._comm = Metered(self.parts[0].peers.everyone)
        self._worker = self._comm.worker
        self._track = Track(self._comm.rank)
        self._agreed = self._started = self._inside_step = self._inside_averaged = False
        self._lockstep = self._equal = True
        self._nonce = self._run = 0  # rank 0's, of which nobody else has the same; and that of the whole run
        self._unseen: int | None = None  # the checksum of weights that the caller has yet to load
        self._reports: deque[Report] = deque(maxlen=1000)
        self._totals = Totals()
        self._trained = [
            (name, p, p.requires_grad) for name, p in named(self.model.named_parameters()).items()
        ]
        for index, part in enumerate(self.parts):
            part.bind(index, self.optimizers, self._take)

    def __repr__(self) -> str:
        return self.method

    def agree(self, method: str | None = None) -> None:
        """Raise on every rank unless all workers have this very method and model. Sends no weights."""
        if method is not None:
            self.method = agreement.without_addresses(method)
        if not self._agreed:
            lines = agreement.describe(self.method, self.model)
            nonce = round(self._comm.now() * 1e9)
            self._nonce = agreement.compare_lines(lines, self._comm, nonce=nonce)
            self._worker.follow(self._track)
            for part in self.parts:
                part.communicators()  # connects to its peers, while everybody is here
            self._agreed = True

    def step(self, local: Callable[[], Any] | None = None) -> Any:
        """One iteration, in place of `optimizer.step()`.

        `local` is what else used to stand there, such as unscaling, clipping, `scaler.step(optimizer)` and
        `scaler.update()`; it is always called, and its result returned. Without it the optimizers step.
        """
        theirs = self._before()
        with self._failing(), nullcontext() if theirs else held_still(self.optimizers, self._stepped):
            result = (local or self._local)()
        self.after_step()
        return result

    def observe(self, loss: float | Tensor) -> None:
        """Tell schedules that decide by it the loss of the coming step."""
        for part in self.parts:
            part.observe(loss)

    def before_step(self) -> bool:
        """For frameworks that own the step: gradients are ready. False: do not step your optimizer."""
        theirs = self._before()
        if not theirs:
            with self._failing():
                for optimizer in self.optimizers:
                    self._stepped(optimizer)
        return theirs

    def _before(self) -> bool:
        """An iteration begins; whether the optimizers are to step."""
        self._must_be_open("step()")
        if self._inside_step:
            raise RuntimeError("before_step(): the step before has not ended: call after_step() first.")
        with self._failing():
            self._start()
            self._inside_step = True
            self._track.at(self.steps + 1)
            self._worker.computed(self.steps)
            self._lr = learning_rate(self.optimizers)
            self._must_train_the_same()
            for part in self.parts:
                part.plan(self._clock())
            ready = [part.before(self._clock()) for part in self.parts]
        return all(ready)

    def after_step(self) -> None:
        """For frameworks that own the step: parameters have moved."""
        if not self._inside_step:
            raise RuntimeError("after_step(): call before_step() first.")
        self._inside_step = False
        for part in self.parts:
            part.release()
        with self._failing():
            self._complete()
            while self._again():
                for part in self.parts:
                    part.plan(self._clock())
                self._complete()

    def _stepped(self, optimizer: Optimizer) -> None:
        for part in self.parts:
            part.stepped(optimizer)

    def _again(self) -> bool:
        answers = [part.again(self._clock()) for part in self.parts]
        return any(answers)

    def _complete(self) -> None:
        """One more iteration is complete: the parts act on the moved parameters."""
        self.steps += 1
        self._track.at(self.steps)
        for part in self.parts:
            part.after(self._clock())
        # Equal weights stay equal under equal gradients only while the optimizers' moments never went apart.
        self._lockstep = self._lockstep and any(part.shared_gradient(self.steps) for part in self.parts)
        self._equal = self._lockstep or any(part.made_equal(self.steps) for part in self.parts)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The workers' mean weights and floating buffers in the model, for evaluation; restored on leaving.

        Every rank enters. Messages in the air stay there.
        """
        if self._inside_averaged:
            raise RuntimeError("averaged(): it is already active.")
        if self._inside_step:
            raise RuntimeError("averaged(): a step is under way: call after_step() first.")
        self._start()
        with put_aside(self.model):
            self._inside_averaged = True
            try:
                if not self._equal:
                    with self._failing(), self._accounted():
                        self._show_consensus()
                yield
            finally:
                self._inside_averaged = False

    def finish(self) -> None:
        """Land what is in the air and leave every worker with the same weights. Every rank calls it."""
        if self.finished:
            return
        self._must_be_open("finish()")
        if self._inside_step:
            raise RuntimeError("finish(): a step is under way: call after_step() first.")
        with self._failing():
            self._start()
            with self._accounted():
                self._meet(agreement.FINISH)
            landed = [part.flush(self._clock()) for part in self.parts]
            settled = all(part.made_equal(self.steps) for part in self.parts)
            with self._accounted():
                if (any(landed) or not self._equal) and not settled:
                    replace_by_mean(self.model, self._comm)
            for part in self.parts:
                part.follow()
        self._equal = self.finished = True
        logger.info("%r finished after %d steps: %s", self, self.steps, self.totals)

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._leave(error)

    def state_dict(self) -> State:
        """All the method needs to go on, without the weights; saved per rank, beside model and optimizer.

        Every rank calls it after the same step: it waits for what is in the air.
        """
        if self._inside_averaged or self._inside_step:
            raise RuntimeError(
                "state_dict(): not inside averaged() or a step: the weights are not those to save."
            )
        first = max(part.savable(self.steps) for part in self.parts)
        if first > self.steps:
            raise RuntimeError(
                f"state_dict(): {self.method} cannot be saved after step {self.steps}, where the workers may "
                f"be in different rounds: the next step that allows it is {first}."
            )
        with self._failing():
            parts = [part.state_dict() for part in self.parts]
        return {
            **checkpoint.origin(self.method, self._comm),
            "steps": self.steps,
            "lr": self._lr,
            "started": self._started,
            "lockstep": self._lockstep,
            "equal": self._equal,
            "run": self._run,
            "weights": checkpoint.checksum(self.model) if self._started else None,
            "parts": parts,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint; every rank loads its own. Model and optimizer are loaded by the caller.

        Weights other than those saved with it are refused, at the latest when the next step begins.
        """
        self._must_be_open("load_state_dict()")
        with self._accounted():
            with self._failing():
                self.agree()
            loaded = checkpoint.check_origin(state, self.method, self.model, self._comm)
        self.steps, self._lr, self._started = state["steps"], state["lr"], state["started"]
        self._lockstep, self._equal = state["lockstep"], state["equal"]
        self._run, self._unseen = state["run"], None if loaded else state["weights"]
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)

    @property
    def reports(self) -> list[Report]:
        """The last 1 000 rounds. Waits for the drift of the last one."""
        self._flush_reports()
        return list(self._reports)

    @property
    def totals(self) -> Totals:
        """What the run has cost so far, on this worker."""
        self._flush_reports()
        return self._totals

    def _clock(self) -> Clock:
        return Clock(step=self.steps, round=0, lr=self._lr)

    def _local(self) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()
        return None

    def _start(self) -> None:
        """Once: make sure all workers mean the same, and give them rank 0's weights and buffers."""
        if self._unseen is not None:
            with self._accounted():
                checkpoint.check_weights(self._unseen, self.model, self._comm)
            self._unseen = None
        if self._started:
            return
        self.agree()
        with self._accounted():
            take_from_first(self.model, self._comm)
        self._run = checkpoint.identity(self.method, self._nonce, self.model)
        self._started = True
        logger.info("%r on %d workers starts at step %d", self, self._comm.size, self.steps)

    def _meet(self, kind: int) -> None:
        """All workers are at the same place, or all raise."""
        self._track.meet(agreement.name(kind), self.steps)
        where = agreement.header(kind, 0, self._clock(), mark(self.optimizers), self._comm.rank)
        talks = {id(comm): Metered(comm) for part in self.parts for comm in part.communicators()}
        # On all of them at once: a worker that is elsewhere waits for us on one.
        for message in [comm.tell(where) for comm in talks.values()]:
            agreement.compare_headers(message.wait())
        self._track.met()
        self._comm.sent += sum(comm.sent for comm in talks.values())
        self._comm.received += sum(comm.received for comm in talks.values())

    def _show_consensus(self) -> None:
        """Anchors where a method has them, the mean of everything else."""
        agreed: set[str] = set()
        for tensors, everywhere in [part.shown() for part in self.parts]:
            write(self.model, tensors)
            agreed = agreed | set(tensors) if everywhere else agreed - set(tensors)
        if agreed != set(trainable(self.model)) or floating_buffers(self.model):
            self._meet(agreement.AVERAGED)
            replace_by_mean(self.model, self._comm, but=agreed)

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """What the synchronizer itself sends inside, and the time it takes, belong to the totals."""
        start = self._comm.now()
        try:
            yield
        finally:
            self._totals.bytes_sent += self._comm.sent
            self._totals.bytes_received += self._comm.received
            self._totals.seconds_waited += self._comm.now() - start
            self._totals.seconds_in_air += self._comm.now() - start
            self._comm.sent = self._comm.received = 0

    def _take(self, report: Report) -> None:
        self._reports.append(report)
        self._totals.add(report)
        logger.debug("%s", report)
        if self.on_report is not None:
            self.on_report(report)

    def _flush_reports(self) -> None:
        for part in self.parts:
            part.flush_reports(wait=True)
            sent, received = part.unreported()
            self._totals.bytes_sent += sent
            self._totals.bytes_received += received

    def _must_train_the_same(self) -> None:
        for name, parameter, before in self._trained:
            if parameter.requires_grad != before:
                change = "frozen" if before else "unfrozen"
                raise RuntimeError(
                    f"{name!r} was {change} after the synchronizer was made: finish() it and make another."
                )

    def _must_be_open(self, call: str) -> None:
        if self.finished:
            raise RuntimeError(f"{call}: this run was ended by finish(); make a new synchronizer to go on.")
        if self._inside_averaged:
            raise RuntimeError(
                f"{call}: not inside averaged(): the weights in the model are not the live ones."
            )

    def _leave(self, error: BaseException) -> None:
        for part in self.parts:
            part.leave(Departure.of(error))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside is one this rank goes down with: others are told, what was changed is undone."""
        try:
            yield
        except BaseException as error:
            for part in self.parts:
                part.release()
            self._leave(error)
            raise


def _check_order(parts: Sequence[Part]) -> None:
    """Parts that rely on another stand directly after it."""
    for before, part in zip([None, *parts], parts, strict=False):
        if part.follows is not None and part.follows is not before:
            name, other = type(part).__name__, type(part.follows).__name__
            raise ValueError(
                f"Synchronizer(...): {name} must stand directly after the {other} it was given: list them as "
                f"[exchange, {name}(exchange, ...)]."
            )
