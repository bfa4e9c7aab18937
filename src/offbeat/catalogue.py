"""What every named method does and costs: read from its parts, and measured in simulation."""

from __future__ import annotations

import ast
import gc
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn

from offbeat import methods
from offbeat.comm import Communicator, Solo
from offbeat.cost import Report
from offbeat.errors import OffbeatError
from offbeat.exchange import Exchange
from offbeat.expression import method
from offbeat.part import Part
from offbeat.simulate import simulate
from offbeat.sync import Synchronizer

WORKERS = 8
STEPS = 132  # two of the longest periods in the examples, and a delay
LAYERS, WIDTH = 4, 32


@dataclass(frozen=True)
class Line:
    """One part of a method: when, with whom, what is sent, how it is applied, and how many steps hide it."""

    when: str
    among: str
    sent: str
    applied: str
    delay: str


@dataclass(frozen=True)
class Entry:
    """One method. The figures are those of `call`, None where it does not run in simulation."""

    name: str
    call: str  # the example of its docstring
    summary: str
    lines: tuple[Line, ...]
    bytes_per_step: float | None  # those of ddp are 1
    copies: float | None  # of the model, kept beside model, gradients and optimizer
    reference: str


def catalogue(names: Sequence[str] = methods.__all__) -> list[Entry]:
    """The named methods, in the order given."""
    base, _ = _measure(_simulated("ddp()"))
    return [_entry(name, base) for name in names]


def example(name: str) -> str:
    """The call in a method's docstring, without model and optimizer."""
    text = inspect.getdoc(getattr(methods, name)) or ""
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("sync = offbeat."))
    call = ast.parse(line.removeprefix("sync = offbeat."), mode="eval").body
    assert isinstance(call, ast.Call)
    return f"{name}({', '.join(ast.unparse(keyword) for keyword in call.keywords)})"


def reference(name: str) -> str:
    """The paragraph of a method's docstring that cites a paper."""
    paragraphs = (inspect.getdoc(getattr(methods, name)) or "").split("\n\n")
    cited = [" ".join(paragraph.split()) for paragraph in paragraphs if "arXiv" in paragraph]
    return cited[-1] if cited else ""


def _entry(name: str, base: float) -> Entry:
    call = example(name)
    try:
        runs = _simulated(call)
        sync, (sent, copies) = runs[0][0], _measure(runs)
    except (NotImplementedError, OffbeatError, TypeError, ValueError):
        sync, sent, copies = _built(call, Solo()), None, None
    return Entry(
        name=name,
        call=call,
        summary=(inspect.getdoc(getattr(methods, name)) or "").splitlines()[0],
        lines=tuple(_line(part) for part in sync.parts),
        bytes_per_step=None if sent is None else sent / base,
        copies=copies,
        reference=reference(name),
    )


def _line(part: Part) -> Line:
    among = brief(part.peers)
    if isinstance(part, Exchange):
        what = f"{part.live!r}".replace("params", "parameters").replace("grads", "gradients").split("(")[0]
        sent = what if repr(part.reduce) == "Mean()" else f"{what}, {part.reduce!r}"
        return Line(brief(part.when), among, sent, brief(part.update), str(part.delay))
    said = (inspect.getdoc(type(part)) or "").splitlines()[0]
    return Line(repr(part), among, "", said, "")


def brief(value: object) -> str:
    """The value as one would type it, without what is the default or the group."""
    if not is_dataclass(value):
        return repr(value)
    told = [(f.name, getattr(value, f.name)) for f in fields(value) if f.repr and f.name != "group"]
    kept = [(name, given) for name, given in told if not _is_default(value, name, given)]
    return f"{type(value).__name__}({', '.join(f'{name}={brief(given)}' for name, given in kept)})"


def _is_default(value: object, name: str, given: object) -> bool:
    parameter = inspect.signature(type(value)).parameters.get(name)
    return parameter is not None and parameter.default == given


_Run = tuple[Synchronizer, float]  # and the iterations of the caller for each of the method's


def _simulated(call: str) -> list[_Run]:
    """The example on eight workers, with gradients of zero."""

    def worker(comm: Communicator) -> _Run:
        sync = _built(call, comm)
        for p in sync.model.parameters():
            p.grad = torch.zeros_like(p)
        for _ in range(STEPS):
            sync.observe(1.0)
            sync.step()
        return sync, sync.steps / STEPS

    before = torch.get_rng_state()
    try:
        return simulate(worker, WORKERS)
    finally:
        torch.set_rng_state(before)


def _built(call: str, comm: Communicator) -> Synchronizer:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    return method(call)(model, torch.optim.SGD(model.parameters(), lr=1e-3), group=comm)


def _measure(runs: list[_Run]) -> tuple[float, float]:
    """Bytes a worker sends per step once it is under way, and the copies of the model that it keeps."""
    gc.collect()
    sync, iterations = runs[0]
    copies = _kept([sync for sync, _ in runs]) / len(runs)
    return _rate(sync.reports) * iterations, copies


def _rate(reports: Sequence[Report]) -> float:
    """Bytes per iteration, over as many iterations as the longest period has."""
    last, window = max(r.step for r in reports), max(r.period for r in reports)
    return sum(r.bytes_sent for r in reports if last - window < r.step) / window


def _kept(syncs: Sequence[Synchronizer]) -> float:
    """Model copies in all tensors that are alive, but for those of the caller."""
    theirs: set[int] = set()
    for sync in syncs:
        states = [value for o in sync.optimizers for state in o.state.values() for value in state.values()]
        for p in sync.model.parameters():
            states += [p, p.grad]
        theirs |= {t.untyped_storage().data_ptr() for t in states if isinstance(t, Tensor)}
    alive, generator = {}, torch.get_rng_state().numel()  # of which the simulation keeps one per worker
    for thing in gc.get_objects():
        if type(thing) is Tensor and thing.numel() >= WIDTH and thing.numel() != generator:
            alive[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(size for place, size in alive.items() if place not in theirs) / (4 * LAYERS * WIDTH * WIDTH)
