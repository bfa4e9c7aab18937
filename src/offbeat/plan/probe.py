"""Build a method on a small model among recorded workers, and observe what its parts send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from offbeat import Synchronizer
from offbeat.base.clock import Clock
from offbeat.base.tensors import local
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.weights import replace_by_mean
from offbeat.plan.equality import Equality, measure_equality
from offbeat.plan.fit import Size, by_workers, message_sizes
from offbeat.plan.job import Job
from offbeat.plan.memory import copies
from offbeat.plan.periodic import PeriodicTrace, periodic
from offbeat.plan.proxy_model import WIDTHS, ProxyModel, local_optimizer, real_width
from offbeat.plan.recording import Computed, Event, NullSidecar, RecordingComm, Repeated, Sent
from offbeat.plan.ring import extrapolate, fold, pattern
from offbeat.plan.waitfree_model import NullPart, WaitfreeModel
from offbeat.server import PushPull
from offbeat.waitfree.base import Waitfree
from offbeat.when import Never

Build = Callable[..., Synchronizer]
_SMALL = 16  # up to this many workers are recorded one by one
_LOOKS = 32  # steps after which memory is measured


@dataclass(frozen=True)
class Trace:
    """The messages and waits of a worker, in order, with the bytes of the real model."""

    events: tuple[Event, ...]
    sizes: dict[int, Size]


@dataclass(frozen=True)
class RoundTrace:
    """What one exchange does when a round begins, advances and lands, and when the next one is planned."""

    begin: Trace
    advance: Trace  # half-way, if it lands late
    land: Trace
    ask: Trace
    equality: Equality


@dataclass(frozen=True)
class Seen:
    """Everything observed of one method."""

    sync: Synchronizer  # among the real number of workers, on a small model
    start: Trace
    meet: Trace  # the headers that finish() sends first
    equal: Trace  # what finish() sends last if the workers are equal
    last: Trace  # what it sends last otherwise: a mean
    rounds: dict[int, RoundTrace]  # of each exchange, by its place among the parts
    periodic: PeriodicTrace  # the other parts, step by step
    sizes: dict[int, Size]  # of the messages in `periodic`
    waitfree_parts: tuple[WaitfreeModel, ...]  # the wait-free parts
    copies: float  # of the model


@dataclass
class _Watch:
    """The events of one synchronizer, in a world of `size` workers with a model of this width."""

    size: int
    width: int
    start: list[Event]
    meet: list[Event]
    equal: list[Event]
    last: list[Event]
    rounds: dict[int, dict[str, list[Event]]]
    steps: list[list[Event]]
    reports: list[int]
    copies: float


def probe(build: Build, job: Job, workers: int) -> Seen:
    """Build the method on proxy models of three widths, and record what its parts send."""
    sizes = _worlds(build, job, workers)
    watches = [_watch(build, job, size, width) for size in sizes for width in WIDTHS]
    first = watches[0]
    steps = [tuple(events) for events in first.steps]
    widest = {watch.size: watch.copies for watch in watches if watch.width == WIDTHS[-1]}
    model_copies = max(widest.values())
    if len(sizes) > 1 and not _alike(watches):
        steps = _unfold(watches, workers)
        model_copies = by_workers(widest).at(workers)  # a ring cuts the model among the workers
    width = real_width(job)

    def acts(pick: Callable[[_Watch], list[Event]]) -> Trace:
        told = [(watch.width, pick(watch)) for watch in watches]
        return Trace(tuple(pick(first)), message_sizes(told, width))

    def round_of(place: int) -> RoundTrace:
        def of(name: str) -> Trace:
            return acts(lambda watch: watch.rounds[place][name])

        return RoundTrace(of("begin"), of("advance"), of("land"), of("ask"), equality[place])

    sync = _made(build, job, workers, 8, whole=True)[0]
    exchanges = {i: part for i, part in enumerate(sync.parts) if isinstance(part, Exchange)}
    equality = {place: measure_equality(part, job) for place, part in exchanges.items()}
    for part in exchanges.values():
        part.open()  # some parts pull towards its anchor
    return Seen(
        sync=sync,
        start=acts(lambda watch: watch.start),
        meet=acts(lambda watch: watch.meet),
        equal=acts(lambda watch: watch.equal),
        last=acts(lambda watch: watch.last),
        rounds={place: round_of(place) for place in first.rounds},
        periodic=periodic(steps, first.reports),
        waitfree_parts=tuple(
            WaitfreeModel.of(part, job, workers) for part in sync.parts if isinstance(part, Waitfree)
        ),
        sizes=acts(lambda watch: [event for events in watch.steps for event in events]).sizes,
        copies=model_copies,
    )


def _alike(watches: list[_Watch]) -> bool:
    """Whether the same kinds of messages are sent in all of them."""
    patterns = [[pattern(events) for events in watch.steps] for watch in watches]
    return all(other == patterns[0] for other in patterns)


def _unfold(watches: list[_Watch], workers: int) -> list[tuple[Event, ...]]:
    """The steps among all workers, where messages pass round a ring; folds the watches."""
    for watch in watches:
        watch.steps = [list(fold(events)) for events in watch.steps]
    few, more = watches[0], watches[-1]
    if not _alike(watches):
        raise ValueError(
            f"Cluster(workers={workers}): the messages of this method depend on the number of workers; it "
            f"can be planned for up to {_SMALL}."
        )
    return [
        extrapolate(these, those, (few.size, more.size), workers)
        for these, those in zip(few.steps, more.steps, strict=True)
    ]


def _worlds(build: Build, job: Job, workers: int) -> list[int]:
    """The worlds to record. A small one sends what a large one would; two show what scales with its size."""
    if workers <= _SMALL:
        return [workers]
    found: list[int] = []
    for size in (8, 16, 12, 32, 24, 48, 64, 96, 128, 256):
        if size <= workers and len(found) < 2:
            try:
                _made(build, job, size, 8)
                found.append(size)
            except ValueError:
                continue  # for example, groups that do not divide it
    return found if len(found) == 2 else [workers]


def _made(
    build: Build, job: Job, size: int, width: int, *, whole: bool = False
) -> tuple[Synchronizer, RecordingComm, nn.Module]:
    """Build the method. Unless `whole`, wait-free parts are replaced by parts that do nothing."""
    comm = RecordingComm(size)
    model = ProxyModel(job, width)
    sync = build(model, local_optimizer(job, model), group=comm)
    if not whole:
        sync.parts = [NullPart(part) if isinstance(part, Waitfree) else part for part in sync.parts]
    return sync, comm, model


def _watch(build: Build, job: Job, size: int, width: int) -> _Watch:
    sync, comm, model = _made(build, job, size, width)
    sync.observe(1.0)
    sync.step()
    events = comm.log.take()
    start = events[: next(i for i, event in enumerate(events) if isinstance(event, Computed))]
    held = copies(sync)
    rounds = {}
    for place, part in enumerate(sync.parts):
        if isinstance(part, Exchange):
            rounds[place], most = _watch_round(part, comm, sync)
            held = max(held, most)
    comm.log.take()
    sync.finish()
    meet, equal = _split_finish(comm.log.take())
    replace_by_mean([local(p) for p in model.parameters()], comm)
    last = [*equal, *comm.log.take()]
    steps, reports, closing, most = _watch_others(build, job, size, width)
    if closing:  # the weights that everybody pulls are equal
        equal = last = closing
    held += _waitfree_copies(build, job, size, width)
    return _Watch(size, width, start, meet, equal, last, rounds, steps, reports, max(held, most))


def _waitfree_copies(build: Build, job: Job, size: int, width: int) -> float:
    """Copies of the model that wait-free parts keep."""
    sync = _made(build, job, size, width, whole=True)[0]
    for part in sync.parts:
        if isinstance(part, Waitfree) and part.active:
            part.open_handover(-1, NullSidecar(part.peers.everyone))
    sync.parts = [part for part in sync.parts if isinstance(part, Waitfree)]
    return copies(sync)


def _watch_others(
    build: Build, job: Job, size: int, width: int
) -> tuple[list[list[Event]], list[int], list[Event], float]:
    """Record every step with all exchanges switched off, until the other parts repeat themselves."""
    sync, comm, _ = _made(build, job, size, width)
    reports: list[object] = []
    sync.on_report = reports.append
    for part in sync.parts:
        if isinstance(part, Exchange):
            part.rhythm.when = Never()
            part.open()
    longest = max(map(_steps_to_observe, sync.parts))
    steps: list[list[Event]] = []
    told: list[int] = []
    held = 0.0
    while len(steps) < min(job.steps, max(2, longest)):
        comm.log.take()
        seen = len(reports)
        sync.step()
        events = comm.log.take()
        first = next(i for i, event in enumerate(events) if isinstance(event, Computed))
        steps.append(events[first + 1 :])
        told.append(len(reports) - seen)
        if len(steps) <= _LOOKS:
            held = max(held, copies(sync))
    if not any(steps):
        return [], [], [], 0.0
    comm.log.take()
    sync.finish()
    return steps, told, _split_finish(comm.log.take())[1], held


def _steps_to_observe(part: Part) -> int:
    """How many steps show everything the part ever does: alternate pushes use the same connections."""
    return part.warmup + 5 * part.every + part.in_flight if isinstance(part, PushPull) else 0


def _split_finish(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """The headers that begin finish(), and all that follows. The last word is a checksum."""
    headers = [event.number for event in events if isinstance(event, Sent) and event.control][:-1]
    known = [event for event in events if not isinstance(event, Computed | Repeated)]
    return [e for e in known if e.number in headers], [e for e in known if e.number not in headers]


def _watch_round(
    part: Exchange, comm: RecordingComm, sync: Synchronizer
) -> tuple[dict[str, list[Event]], float]:
    """Record the second round: the first one may create state. No round is in the air when it begins."""
    told: dict[str, list[Event]] = {}
    held, clock = 0.0, Clock(step=1, round=0, lr=1e-3)
    part.observe(1.0)
    if part.rhythm.in_air:
        part.land(clock)
    if not part.opened:
        part.open()
    for _ in range(2):
        clock = Clock(step=clock.step + 1, round=0, lr=1e-3)
        part.observe(1.0)
        comm.log.take()
        part.snapshot_rates()
        part.begin(clock)
        told["begin"] = comm.log.take()
        held = max(held, copies(sync))
        if part.delay:
            part.advance()
        told["advance"] = comm.log.take()
        part.land(clock)
        told["land"] = comm.log.take()
        if part.when.needs:
            part.flush_reports(wait=True)
        told["ask"] = comm.log.take()
    return told, max(held, copies(sync))
