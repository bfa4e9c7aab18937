"""Builds a method on a small model with a recording communicator, to see what its parts send and keep."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, ModuleType

import torch
from torch import Tensor, nn

from offbeat import Synchronizer
from offbeat.among import World
from offbeat.base.clock import Clock
from offbeat.base.packed import Packed
from offbeat.base.tensors import OptimizerState, grads, local, params
from offbeat.comm.communicator import Communicator
from offbeat.engine.agreement import checksum, run_collective
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.plan.groups import Groups
from offbeat.plan.job import Job, ProxyModel, local_optimizer
from offbeat.plan.recording import COMPUTED, Event, Events, QueuedJob, RecordingComm, Sent, Size, Waited
from offbeat.plan.trace import (
    Differ,
    Key,
    PeriodicTrace,
    combine,
    find_period,
    fold,
    join_pieces,
    split_by_workers,
)  # fmt: skip
from offbeat.reduce import Reducer
from offbeat.reduce.vectors import list_buffers
from offbeat.server import PushPull
from offbeat.server.rules import StabilityWatch
from offbeat.simulate import simulate
from offbeat.waitfree.base import Waitfree
from offbeat.when import Every, Never

Build = Callable[..., Synchronizer]
_WIDTHS = (64, 128, 192)  # bytes are quadratic in the width, so three widths give any other
_SMALL = 16  # up to this many workers are recorded one by one
_LOOKS = 32  # the first steps, after which memory is measured
_ROUNDS = 4  # rounds of an exchange with groups of their own; later rounds reuse them
_CYCLE = 8  # the same for wait-free parts
# A method does not own what lies behind these. The size of a StabilityWatch does not depend on the model.
_ELSEWHERE = (type, ModuleType, CodeType, BuiltinFunctionType, nn.Module, StabilityWatch)


@dataclass(frozen=True)
class MethodProfile:
    """Everything observed of one method. `traces` has the messages of the "start"; of finish(), those that
    "meet" first, and the "last", or "equal" if all workers are. Each exchange, by its place among the parts,
    adds those of a round that begins ("begin"), is half-way ("advance") and lands ("land"), and those before
    the next is planned ("ask")."""

    sync: Synchronizer  # among the real number of workers, on a small model
    workers: int
    traces: dict[Key, Events]
    equality: dict[int, tuple[bool, bool]]  # of each exchange, after a round and after `flush`
    periodic: PeriodicTrace  # the other parts, step by step
    waitfree: dict[int, Size]  # the message of each wait-free part
    copies: float  # of the model
    _groups: dict[tuple[int, int], Groups] = field(default_factory=dict)

    def groups(self, place: int, round: int) -> Groups:
        """Return the groups of a part in a round. They repeat after some rounds."""
        part = self.sync.parts[place]
        key = (place, round % (min(part.among.cycle, _CYCLE) if isinstance(part, Waitfree) else _ROUNDS))
        if key not in self._groups:
            comm = part.peers.at(key[1])
            assert isinstance(comm, RecordingComm)
            self._groups[key] = Groups.of(self.workers, comm.groups)
        return self._groups[key]

    def sidecars_send(self, place: int, round: int) -> bool:
        """Whether the sidecars of a wait-free part send anything in a round."""
        part = self.sync.parts[place]
        assert isinstance(part, Waitfree)
        return part.active and (part.sidecars or not part.blocking(round))

    def count_sidecar_rounds(self, place: int, steps: int) -> Counter[Groups]:
        """Count such rounds in this number of steps, by their groups."""
        return Counter(self.groups(place, step) for step in range(steps) if self.sidecars_send(place, step))


def probe(build: Build, job: Job, workers: int) -> MethodProfile:
    """Build the method on proxy models of three widths, and record what its parts send."""
    sizes = _choose_sizes(build, job, workers)
    worlds = [_World(build, job, size, width) for size in sizes for width in _WIDTHS]
    for world in worlds:
        world.record(job)
    first, width = worlds[0], math.sqrt(job.parameters / job.layers)
    copies = {world.workers: world.copies for world in worlds if world.width == _WIDTHS[-1]}
    most = max(copies.values())

    def merge(recordings: Sequence[Sequence[Event]]) -> Events:
        return combine([(w.workers, w.width) for w in worlds], recordings, width, workers)

    steps = list(zip(*(world.steps for world in worlds), strict=True))
    try:
        trace = [merge(step) for step in steps]
    except Differ:
        assert len(sizes) > 1
        whole, cut = split_by_workers(copies)  # a ring cuts the model among the workers
        most = max(0.0, whole + cut / workers)
        try:
            trace = [merge([fold(events) for events in step]) for step in steps]
        except Differ:
            why = "the messages of this method depend on the number of workers"
            raise ValueError(f"Cluster(workers={workers}): {why}: plan it for up to {_SMALL}.") from None
    try:
        traces = {key: merge([world.traces[key] for world in worlds]) for key in first.traces}
    except Differ:
        joined = [join_pieces(world.traces) for world in worlds]
        traces = {key: merge([each[key] for each in joined]) for key in first.traces}
    sync, equality, waitfree = _World(build, job, workers, 8).sync, {}, {}
    for place, part in enumerate(sync.parts):
        if isinstance(part, Exchange):
            equality[place] = _measure_equality(part, job)
            part.open()  # some parts pull towards its anchor
        elif isinstance(part, Waitfree):
            waitfree[place] = Size(job.parameters * Packed.like(part.live.like()).flats[0].element_size())
    periodic = find_period(trace, first.reports, first.gap)
    return MethodProfile(sync, workers, traces, equality, periodic, waitfree, most)


def _measure_equality(part: Exchange, job: Job) -> tuple[bool, bool]:
    """Whether two workers with different gradients are equal after a round, and after a step and `flush`."""
    if isinstance(part.live, OptimizerState):
        return False, False

    def train(comm: Communicator) -> tuple[int, int]:
        model = ProxyModel(job, _WIDTHS[0])
        weights, optimizer = list(model.parameters()), local_optimizer(job, model)
        for p in weights:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(comm.rank)).to(p.dtype)
        live = grads(model) if part.live.early else params(model)
        reduce = None if isinstance(part.update, Reducer) else part.reduce
        exchange = Exchange(live, when=Every(1), among=World(comm), reduce=reduce, update=part.update)
        Synchronizer(optimizer, [exchange]).step()
        after_round = checksum(weights)
        optimizer.step()
        exchange.flush(Clock(step=1, round=1, lr=0.0))
        return after_round, checksum(weights)

    first, second = simulate(train, workers=2)
    return first[0] == second[0], first[1] == second[1] and not part.live.early


def _choose_sizes(build: Build, job: Job, workers: int) -> list[int]:
    """Return the worlds to record. A small one sends what a large one would; two show what scales."""
    if workers <= _SMALL:
        return [workers]
    found: list[int] = []
    for size in (8, 16, 12, 32, 24, 48, 64, 96, 128, 256):
        if size <= workers and len(found) < 2:
            with suppress(ValueError):  # for example, groups that do not divide it
                _World(build, job, size, 8)
                found.append(size)
    return found if len(found) == 2 else [workers]


class _World:
    """One synchronizer among `workers` workers, on a model of this width: what it sends and keeps."""

    def __init__(self, build: Build, job: Job, workers: int, width: int) -> None:
        self.workers, self.width, self.copies, self.gap = workers, width, 0.0, (0, 0)
        self._comm, model = RecordingComm(workers), ProxyModel(job, width)
        self.sync, self._log = build(model, local_optimizer(job, model), group=self._comm), self._comm.log
        for part in self.sync.parts:
            if isinstance(part, Exchange):
                part.send_whole()  # the number of buckets is not a polynomial in the width
        self.traces: dict[Key, Sequence[Event]] = {}
        self.steps: list[Events] = []
        self.reports: list[int] = []

    def record(self, job: Job) -> None:
        """Run some steps with all exchanges switched off, then a round of each exchange, then the end."""
        waitfree = [part for part in self.sync.parts if isinstance(part, Waitfree)]
        for aside in waitfree:  # they are replaced by parts that do nothing
            if aside.active:
                aside.open_handover(-1, self._comm.sidecar())
            self.sync.parts[self.sync.parts.index(aside)] = idle = Part()
            idle.model, idle.peers = aside.model, aside.peers
        held = self._count(waitfree)
        self._record_steps(job)
        for place, part in enumerate(self.sync.parts):
            if isinstance(part, Exchange):
                self._record_round(part, place)
        self.sync.finish()
        # Headers come first. The last word is a checksum.
        events = [event for event in self._log.take() if isinstance(event, Sent | Waited | QueuedJob)]
        heads = [event.name for event in events if isinstance(event, Sent) and event.control][:-1]
        self.traces["meet"] = [event for event in events if event.name in heads]
        self.traces["equal"] = last = [event for event in events if event.name not in heads]
        if not any(self.steps):  # otherwise everybody has pulled the same weights
            run_collective([local(p) for p in self.sync.model.parameters()], self._comm.mean)
        self.traces["last"] = [*last, *self._log.take()]
        self.copies += held

    def _look(self) -> None:
        self.copies = max(self.copies, self._count(self.sync.parts))

    def _count(self, parts: Sequence[Part]) -> float:
        """Count copies, on the widest model only: it takes long, and small tensors matter least there."""
        return _count_copies(self.sync, parts) if self.width == _WIDTHS[-1] else 0.0

    def _record_steps(self, job: Job) -> None:
        """Record steps until the parts that are not exchanges repeat themselves."""
        told, wanted = list[object](), 2
        self.sync.on_report = told.append
        for part in self.sync.parts:
            if isinstance(part, Exchange):
                part.rhythm.when = Never()
                part.open()
            elif isinstance(part, PushPull):
                # Steps of the warm-up are alike once the slots are full. Every other one uses the same queue.
                warm = min(part.warmup, job.steps)
                skipped = max(0, warm - part.in_flight - 2) // 2 * 2
                self.gap = (warm - skipped, skipped)
                part.warmup -= skipped
                wanted = max(2, part.warmup + 5 * part.every + part.in_flight)
        while len(self.steps) < min(job.steps - self.gap[1], wanted):
            before = len(told)
            self.sync.step()
            events = self._log.take()
            ready = events.index(COMPUTED)
            self.traces.setdefault("start", events[:ready])
            self.steps.append(tuple(events[ready + 1 :]))
            self.reports.append(len(told) - before)
            if len(self.steps) <= _LOOKS:
                self._look()

    def _record_round(self, part: Exchange, place: int) -> None:
        """Record the second round: the first one may create state."""
        for step in (2, 3):
            clock = Clock(step=step, round=0, lr=1e-3)
            part.ledger.observe([1.0])
            part.snapshot_rates()
            self._log.take()
            part.begin(clock)
            self.traces[place, "begin"] = self._log.take()
            self._look()
            if part.delay:
                part.advance()
            self.traces[place, "advance"] = self._log.take()
            part.land(clock)
            self.traces[place, "land"] = self._log.take()
            if part.when.needs:
                part.flush_reports(wait=True)
            self.traces[place, "ask"] = self._log.take()
        self._look()


def _count_copies(sync: Synchronizer, parts: Sequence[Part]) -> float:
    """Return the tensors that these parts keep besides model, gradients and optimizer, in model copies."""
    theirs = [value for o in sync.optimizers for state in o.state.values() for value in state.values()]
    theirs += [tensor for p in sync.model.parameters() for tensor in (p, p.grad)]
    known = {t.untyped_storage().data_ptr() for t in theirs if isinstance(t, Tensor)}
    things, seen, held = list[object](parts), set(map(id, sync.optimizers)), dict[int, int]()
    while things:
        thing = things.pop()
        if id(thing) in seen or isinstance(thing, _ELSEWHERE):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            continue
        things += list_buffers(thing) if isinstance(thing, Packed) else []
        # A function's globals would lead to everything.
        things += [t for t in gc.get_referents(thing) if not (isinstance(t, dict) and "__builtins__" in t)]
    own = sum(size for pointer, size in held.items() if pointer not in known)
    return own / sum(p.numel() * p.element_size() for p in sync.model.parameters())
