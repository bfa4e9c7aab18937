"""The driver, which takes the place of the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.clock import Clock, State
from offbeat.base.tensors import clean_names, trainable
from offbeat.comm.changing import Changing
from offbeat.comm.communicator import Metered
from offbeat.comm.presence import Track
from offbeat.engine import agreement
from offbeat.engine.commits import Commits, Rejoin
from offbeat.engine.headers import AVERAGED, FINISH, KINDS
from offbeat.engine.loading import Loaded, may_resize
from offbeat.engine.optimizers import check_trained, learning_rate, list_optimizers, read_rates, replace_steps
from offbeat.engine.part import Landing, Part, check_parts, check_samples, check_timed, paused
from offbeat.engine.report import Costs, Emit, Report, logger
from offbeat.engine.round import Round
from offbeat.engine.run import Run
from offbeat.engine.watch import DriftWatch, StepWatch
from offbeat.engine.weights import TIMED


class Synchronizer(Run):
    """Drives the parts of a method. Calls `on_report` with every `Report`, and `on_join` when it joins."""

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        parts: Sequence[Part],
        *,
        on_report: Emit | None = None,
    ) -> None:
        self.parts, self.on_report, self.on_join = list(parts), on_report, None
        check_parts(self.parts)
        self._timed = check_timed(self.parts)
        self.method = agreement.without_addresses(f"Synchronizer({self.parts!r})")
        self.model = self.parts[0].model
        self.optimizers = list_optimizers(optimizer, self.model)
        self.steps = 0  # completed iterations
        self.finished, self._lr = False, learning_rate(self.optimizers)
        self._comm = Metered(everyone := self.parts[0].peers.everyone)
        self._worker, self._track = self._comm.worker, Track(self._comm.rank)
        self._agreed = self._started = self._inside_step = self._inside_averaged = self._dry = False
        self._nonce = self._run = 0  # numbers that identify this object and the run, both from rank 0
        self._loaded: Loaded | None = None  # until the model has the weights to continue with
        self._losses: list[float | Tensor] = []  # observed since the last step
        self._costs, parameters = Costs(), clean_names(self.model.named_parameters())
        self._trained = [(name, p, p.requires_grad) for name, p in parameters.items()]
        self._releasing = [part for part in self.parts if type(part).release is not Part.release]
        self._repeating = [part for part in self.parts if type(part).again is not Part.again]
        self._watch: StepWatch | None = (watch := StepWatch(self, self._comm))  # both only at the start
        self._drift_watch = DriftWatch() if watch.real else None
        for index, part in enumerate(self.parts):
            part.totals = self._costs.totals
            part.bind(index, self.optimizers, self._emit)
        self._commits = Commits(self, everyone) if isinstance(everyone, Changing) else None

    def agree(self, method: str | None = None) -> None:
        """Raise on every rank unless all workers have the same method and model. Sends no weights."""
        if method is not None:
            self.method = agreement.without_addresses(method)
        if not self._agreed:
            lines, nonce = agreement.describe_run(self.method, self.model), round(self._comm.now() * 1e9)
            self._nonce = agreement.compare_lines(lines, self._comm, nonce=nonce)
            self._worker.follow(self._track)
            for part in self.parts:
                part.communicators()  # connects to its peers while all workers are here
            self._comm.tell([]).wait()  # a worker that ended now would cut off others that still connect
            self._agreed = True

    def start(self) -> None:
        """Give rank 0's weights to all workers before their first gradient, not only in the first step."""
        self._must_be_open("start()")
        with self._failing():
            self._start()

    def step(self, local: Callable[[], Any] | None = None, *, samples: float | None = None) -> Any:
        """Make one iteration, in place of `optimizer.step()`.

        `local` does everything that belongs to the step: unscaling, clipping, `scaler.step(optimizer)` and
        `scaler.update()`. It is always called, and its result is returned. Without it the optimizers step.
        `samples` weighs this worker: rounds take Σ w x / Σ w, where w adds up the samples since the last one.
        """
        if self.finished or self._inside_averaged or self._inside_step:
            self._must_be_open("step()")
        try:
            theirs = self._before(samples)
            with nullcontext() if theirs else replace_steps(self.optimizers, self._stepped):
                result = None if local is None else local()
                for optimizer in self.optimizers if local is None else ():
                    optimizer.step()
            self._after()
        except BaseException as error:
            self._leave(error)
            raise
        return result

    def observe(self, loss: float | Tensor) -> None:
        """Give the loss of the coming step to schedules that depend on it."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def before_step(self, *, samples: float | None = None) -> bool:
        """For frameworks that own the step: gradients are ready. If it returns False, do not step."""
        self._must_be_open("before_step()")
        with self._failing():
            theirs = self._before(samples)
            for optimizer in () if theirs else self.optimizers:
                self._stepped(optimizer)
        return theirs

    def after_step(self) -> None:
        """For frameworks that own the step: parameters have moved."""
        if not self._inside_step:
            raise RuntimeError("after_step(): call before_step() first.")
        with self._failing():
            self._after()

    def _before(self, samples: float | None, *, dry: bool = False) -> bool:
        """Begin an iteration. Return whether the optimizers step. A dry worker has no gradient."""
        if samples is not None:
            check_samples(samples, self.parts)
        if self._loaded is not None or not self._started:
            self._start()
            self._drop_gradients()
        if self._watch is not None:
            self._watch = self._watch.check(self)
        self._inside_step, self._dry = True, dry
        self._track.step = self._place if self._timed else self.steps + 1
        self._worker.computed(self.steps, 0.0 if dry else 1.0)
        self._lr = learning_rate(self.optimizers)
        check_trained(self._trained)
        clock = Clock(self.steps, 0, self._lr, observed=tuple(self._losses), samples=samples, dry=dry)
        self._losses = []
        for part in self.parts:
            part.plan(clock)
        if self._commits is not None:
            self._commits.poll()
        try:
            return False not in [part.before(clock) for part in self.parts]
        except Rejoin as late:
            late.adopt()
            self._drop_gradients()
            return True

    def _after(self) -> None:
        """Complete the iteration, and those without a gradient: let the parts act on the new parameters."""
        self._inside_step = False
        for part in self._releasing:
            part.release()
        again = True
        try:
            while again:
                self.steps += 1
                self._track.step = self._place if self._timed else self.steps
                clock = Clock(self.steps, 0, self._lr)
                for part in self.parts:
                    if landing := part.after(clock):
                        for other in self.parts:
                            if other is not part:
                                other.follow(landing)
                again = bool(self._repeating) and True in [part.again(clock) for part in self._repeating]
                for part in self.parts if again else ():
                    part.plan(replace(clock, dry=self._dry))
        except Rejoin as late:
            late.adopt()

    def _stepped(self, optimizer: Optimizer) -> None:
        for part in self.parts:
            part.stepped(optimizer)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the workers' consensus into the model, for evaluation, and restore the model on leaving.

        The consensus is the anchor where a method has one, and the mean of all other weights and of floating
        buffers. Every rank enters. Messages in flight stay there.
        """
        self._must_be_open("averaged()", finished=True)
        with self._failing():
            self._start()
        with agreement.preserve(self.model) as restore, paused(self.parts):
            self._inside_averaged = True
            try:
                if not self.finished:
                    with self._failing():
                        self._together(self._show_consensus, restore)
                yield
            finally:
                self._inside_averaged = False
                if self._watch is not None:
                    self._watch.skip_sent()

    def _show_consensus(self) -> None:
        self._meet(AVERAGED)
        for tensors in [part.shown() for part in self.parts]:  # read all, then write
            agreement.write(self.model, tensors)
        agreement.average_where_different(self.model, self._comm)

    def finish(self) -> None:
        """Land messages in flight and leave every worker with the same weights. Every rank calls it."""
        if self.finished:
            return
        self._must_be_open("finish()")
        if self._watch is not None:
            self._watch.finish(self.steps, self._comm.size)
            self._watch = None
        with self._failing():
            self._start()
            self._together(lambda: self._meet(FINISH))
            for part in self.parts:
                part.flush(Clock(self.steps, 0, self._lr))
            self._together(lambda: agreement.average_where_different(self.model, self._comm), last=True)
            for part in self.parts:
                part.follow(Landing(trainable(self.model), math.inf))
        self.finished = True
        self._close(finished=True)
        logger.info("%r finished after %d steps: %s", self, self.steps, self.totals)

    def state_dict(self) -> State:
        """Return all the method needs to continue, without the weights. Save it with model and optimizer.

        Every rank calls it after the same step and saves its own. It waits for messages in flight.
        """
        self._must_be_open("state_dict()", finished=True)
        agreement.check_step(self.method, self.steps, [part.saved_every for part in self.parts])
        with self._failing():
            if self._loaded is not None and self._loaded.ranks is not None:
                self._start()
            parts = [part.state_dict() for part in self.parts]
        weights = agreement.weights_checksum(self.model) if self._started else None
        place = {"steps": self.steps, "place": self._place, "lr": self._lr, "started": self._started}
        origin = {**agreement.origin(self.method, self._comm), "run": self._run}
        return {**origin, **place, "weights": weights, "parts": parts}

    def load_state_dict(self, state: State, *, resize: bool = False) -> None:
        """Continue from a checkpoint. Every rank loads its own; the caller loads model and optimizer.

        Raises if the weights are not those saved with it, at the latest when the next step begins. `resize`
        allows another number of workers, each with any one of the files. The step then begins by making all
        weights the consensus, and what codes have not sent yet is dropped.
        """
        self._must_be_open("load_state_dict()")
        resize = resize and may_resize(self, state)
        with self._costs.including(self._comm):
            with self._failing():
                self.agree()
            self._loaded = Loaded(state, self, resize=resize)
        self.steps, self._lr, self._started = state["steps"], state["lr"], state["started"]
        self._run = state["run"]
        with self._failing():
            for part, saved in zip(self.parts, self._loaded.states(self.parts), strict=True):
                part.load_state_dict(saved)

    def _start(self) -> None:
        """Once: check that all workers agree, and give them the weights and buffers of rank 0."""
        if self._loaded is not None:
            with self._costs.including(self._comm), paused(self.parts):
                self._loaded.complete(self)
            self._loaded = None
        if (self._commits is not None and self._commits.join()) or self._started:
            return
        self.agree()
        self._track.begun = True
        with self._costs.including(self._comm):
            agreement.run_collective(agreement.list_all(self.model), self._comm.broadcast)
        weights = agreement.weights_checksum(self.model)
        self._run, self._started = agreement.digest(f"{self.method} {self._nonce} {weights}"), True
        logger.info("%r on %d workers starts at step %d", self, self._comm.size, self.steps)

    def _meet(self, kind: int) -> None:
        """Raise on every rank unless all workers are at the same place."""
        self._track.meet(KINDS[kind], self._place)
        clock, rates = Clock(self.steps, self._place * self._timed, self._lr), read_rates(self.optimizers)[0]
        talks = {id(comm): comm for part in self.parts for comm in part.communicators()}
        meetings = [Round(clock, comm, since=self.steps) for comm in talks.values()]
        for meeting in meetings:  # all at once: a worker at another point waits for one of them
            meeting.entered = () if self._commits is None else self._commits.meetings.entered
            meeting.compare(0, rates, self._comm.rank, flags=kind | TIMED * self._timed)
        for meeting in meetings:
            meeting.wait()
            self._costs.count(meeting.comm)
        self._track.met()

    def _emit(self, report: Report) -> None:
        self._costs.add(report)
        if self._drift_watch is not None:
            self._drift_watch = self._drift_watch.check(report, self)
        if self.on_report is not None:
            self.on_report(report)
