"""A table of what every named method does and costs, read from its parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offbeat import methods
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.methods.expression import Call, brief, method
from offbeat.plan import Flat, Job
from offbeat.plan.per_step import per_step_cost
from offbeat.plan.recording import RecordingComm

WORKERS = 8
PARAMETERS = 124_000_000
STEPS = 4_800  # a multiple of all periods in the examples
JOB = Job(STEPS, PARAMETERS, rate=Flat(0.01), optimizer="momentum", layers=16)


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
    """One method. The figures are for `call` with `PARAMETERS` and `WORKERS`, after any warm-up. Schedules
    that follow drift or loss keep their first period."""

    name: str
    call: str  # the example of its docstring
    summary: str
    lines: tuple[Line, ...]
    bytes_per_step: float  # sent by one worker
    share_of_ddp: float  # relative to ddp
    copies: float  # of the model, besides model, gradients and optimizer, at the peak
    reference: str


def methods_table(names: Sequence[str] = methods.__all__) -> list[Entry]:
    """The named methods, in the order given."""
    base = per_step_cost(method("ddp"), JOB, WORKERS).bytes_per_step
    return [_entry(name, base) for name in names]


def example(name: str) -> Call:
    """The call in a method's docstring."""
    text = inspect.getdoc(getattr(methods, name)) or ""
    found = re.search(rf"sync = offbeat\.{name}\(model, optimizer(?:, )?(.*)\)$", text, re.MULTILINE)
    assert found is not None, f"the docstring of {name} has no example"
    return method(f"{name}({found[1]})")


def reference(name: str) -> str:
    """The paragraph of a method's docstring that cites a paper."""
    paragraphs = (inspect.getdoc(getattr(methods, name)) or "").split("\n\n")
    cited = [" ".join(paragraph.split()) for paragraph in paragraphs if "arXiv" in paragraph]
    return cited[-1] if cited else ""


def _entry(name: str, base: float) -> Entry:
    call = example(name)
    cost = per_step_cost(call, JOB, WORKERS)
    return Entry(
        name=name,
        call=str(call),
        summary=(inspect.getdoc(getattr(methods, name)) or "").splitlines()[0],
        lines=tuple(_line(part) for part in _parts(call)),
        bytes_per_step=cost.bytes_per_step,
        share_of_ddp=cost.bytes_per_step / base,
        copies=cost.copies,
        reference=reference(name),
    )


def _parts(call: Call) -> list[Part]:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(JOB.layers)])
    sync = call(model, torch.optim.SGD(model.parameters(), lr=0.01), group=RecordingComm(WORKERS))
    return sync.parts


def _line(part: Part) -> Line:
    among = brief(part.peers)
    if isinstance(part, Exchange):
        what = f"{part.live!r}".replace("params", "parameters").replace("grads", "gradients").split("(")[0]
        sent = what if repr(part.reduce) == "Mean()" else f"{what}, {part.reduce!r}"
        return Line(brief(part.when), among, sent, brief(part.update), str(part.delay))
    summary = (inspect.getdoc(type(part)) or "").splitlines()[0]
    when = re.sub(r"(params|grads)\(\d+ tensors?\), |, (server=None|among=World\(\))", "", repr(part))
    return Line(when, among, "", summary, "")
