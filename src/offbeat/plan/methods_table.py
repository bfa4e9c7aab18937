"""A table of what every named method does and costs, read from its parts."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from offbeat import methods
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.methods.expression import Call, brief, method
from offbeat.plan.forecast import bytes_sent, unroll
from offbeat.plan.job import Flat, Job
from offbeat.plan.probe import probe
from offbeat.plan.recording import RecordingComm

WORKERS, PARAMETERS = 8, 124_000_000
STEPS = 4_800  # a multiple of all periods in the examples
JOB = Job(STEPS, PARAMETERS, rate=Flat(0.01), layers=16)
_LEAD = 128  # first steps, which do not count
_WARM = ("warmup", "switch")  # arguments that say how long a method first does something else


@dataclass(frozen=True)
class Line:
    """One part of a method: when, among whom, what is sent, how it is applied, behind how many steps."""

    when: str
    among: str
    sent: str
    applied: str
    delay: str


@dataclass(frozen=True)
class Entry:
    """One method. The figures are for `call` after any warm-up; schedules keep their first period."""

    name: str
    call: str  # the example of its docstring
    summary: str
    lines: tuple[Line, ...]
    bytes_per_step: float  # sent by one worker
    share_of_ddp: float  # relative to ddp
    copies: float  # of the model, besides model, gradients and optimizer, at the peak
    reference: str


def methods_table(names: Sequence[str] = methods.__all__) -> list[Entry]:
    """Return the named methods, in the order given."""
    base = _measure(method("ddp"))[0]
    return [_describe(name, base) for name in names]


def _describe(name: str, base: float) -> Entry:
    doc = inspect.getdoc(getattr(methods, name)) or ""
    found = re.search(rf"sync = offbeat\.{name}\(model, optimizer(?:, )?(.*)\)$", doc, re.MULTILINE)
    assert found is not None, f"the docstring of {name} has no example"
    call = method(f"{name}({found[1]})")
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(JOB.layers)])
    sync = call(model, torch.optim.SGD(model.parameters(), lr=0.01), group=RecordingComm(WORKERS))
    per_step, copies = _measure(call)
    cited = [" ".join(paragraph.split()) for paragraph in doc.split("\n\n") if "arXiv" in paragraph]
    summary, lines, share = doc.splitlines()[0], tuple(map(_describe_part, sync.parts)), per_step / base
    return Entry(name, str(call), summary, lines, per_step, share, copies, cited[-1] if cited else "")


def _describe_part(part: Part) -> Line:
    among = brief(part.peers)
    if isinstance(part, Exchange):
        what = f"{part.live!r}".replace("params", "parameters").replace("grads", "gradients").split("(")[0]
        sent = what if repr(part.reduce) == "Mean()" else f"{what}, {part.reduce!r}"
        return Line(brief(part.when), among, sent, brief(part.update), str(part.delay))
    summary = (inspect.getdoc(type(part)) or "").splitlines()[0]
    when = re.sub(r"(params|grads)\(\d+ tensors?\), |, (server=None|among=World\(\))", "", repr(part))
    return Line(when, among, "", summary, "")


def _measure(call: Call) -> tuple[float, float]:
    """Return the mean bytes that a worker sends per step after the warm-up, and the most copies it keeps."""
    job = replace(JOB, optimizer="momentum") if call.takes("server") else JOB  # a server needs SGD
    profile = probe(without_warmup(call), job, WORKERS)
    steps = (_LEAD, _LEAD + STEPS)
    before, after = (
        bytes_sent(profile, unroll(profile.sync.parts, replace(job, steps=n)), ()) for n in steps
    )
    return (after - before) / STEPS, profile.copies


def without_warmup(call: Call) -> Call:
    """Return the call with a warm-up of one step. What follows is the same, and is observed sooner."""
    return call.but(**{name: 1 for name in _WARM if name in call.arguments})
