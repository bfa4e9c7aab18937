"""A wait-free run, with a record of everything that must hold for it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat import GroupAverage, GroupReport


@dataclass
class Watched:
    """What one worker saw."""

    rounds: list[tuple[int, tuple[int, ...], int, str]] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)  # what was wrong with them
    kinds: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # weights after every step

    @staticmethod
    def check(runs: Sequence[Watched], every: int, steps: int) -> None:
        """Each worker ran every round once, in order, with the same sums in a group and nothing too old; all
        are equal after a global round, and every result was merged by the rule."""
        expected = [t for t in range(steps) if (t + 1) % every]
        sums: dict[tuple[int, tuple[int, ...]], set[str]] = {}
        for rank, run in enumerate(runs):
            assert [t for t, *_ in run.rounds] == expected, f"rank {rank}"
            for t, members, age, digest in run.rounds:
                assert rank in members
                assert 0 <= age <= every - 1, f"round {t} of rank {rank}"
                sums.setdefault((t, members), set()).add(digest)
            assert run.merges == [], f"rank {rank}"
            assert len(run.kinds) == len(expected)
        for (t, members), digests in sums.items():
            assert len(digests) == 1, f"round {t} of {members}"
        for t in expected:
            assert sorted(r for u, members in sums if u == t for r in members) == list(range(len(runs)))
        for step in range(every - 1, steps, every):
            assert len({run.ends[step] for run in runs}) == 1, f"after step {step + 1}"


def digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def watch(
    comm: offbeat.Communicator,
    expression: str,
    steps: int,
    pause: Callable[[int], float] = lambda step: 0.0,
) -> Watched:
    """Train a little model, looking over the shoulder of the sidecar and of every merge."""
    seen = Watched()
    torch.manual_seed(comm.rank)
    net = nn.Linear(5, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = offbeat.method(expression)(net, opt, group=comm)
    part = next(part for part in sync.parts if isinstance(part, GroupAverage))
    _watch_handover(part, seen)
    for step in range(steps):
        net(torch.randn(4, 5)).square().mean().backward()
        time.sleep(pause(step))
        sync.step()
        opt.zero_grad()
        if step == 0:
            assert part._rounds is not None or not part.active
        seen.ends.append(digest(list(net.parameters())))
    seen.kinds = [report.kind for report in sync.reports if isinstance(report, GroupReport)]
    sync.finish()
    return seen


def _watch_handover(part: GroupAverage, seen: Watched) -> None:
    open_handover = part.open_handover

    def opened(version: int, sidecar: Any) -> None:
        open_handover(version, sidecar)
        _watch_rounds(part, part.handover, seen)
        _watch_merges(part, part.handover, seen)

    part.open_handover = opened  # type: ignore[method-assign]


def _watch_merges(part: GroupAverage, handover: Any, seen: Watched) -> None:
    fetch, merge = handover.fetch, handover.merge
    used: list[int] = []
    newest: list[GroupReport] = []

    def fetched() -> None:
        newest.append(part._rounds.newest)
        fetch()

    def merged(tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        round, report = handover.version, newest.pop()
        version = report.round - report.age
        expected = live = [p.detach().double() for p in part.live.parameters]
        if workers > 1 and report.round not in used:
            means = [m.double() for m in handover._reading.views[: len(live)]]
            weight = 0 if version == round else 1
            size = workers + weight
            expected = [(workers * m + weight * x) / size for m, x in zip(means, live, strict=True)]
        if report.round < round or version > round:
            seen.merges.append(f"round {round} got {report.round} with version {version}")
        used.append(report.round)
        merge(tensors, workers, late)
        if part.late == "add":  # nothing is lost: that is tested of the sum over all workers
            return
        for x, y in zip(part.live.parameters, expected, strict=True):
            if not torch.allclose(x.detach().double(), y, rtol=1e-5, atol=1e-6):
                seen.merges.append(f"round {round}: {x} instead of {y}")

    handover.fetch, handover.merge = fetched, merged


def _watch_rounds(part: GroupAverage, handover: Any, seen: Watched) -> None:
    take, bring = handover.take, handover.bring
    now: list[tuple[int, int]] = []

    def taken() -> Any:
        payload, version = take()
        while part._rounds is None:  # the sidecar may begin before the part knows of its rounds
            time.sleep(0.001)
        now.append((part._rounds.done + 1, version))
        return payload, version

    def brought(mean: Any) -> None:
        round, version = now.pop()
        (members,) = [m for m in _groups(part, round) if part.among.everyone.rank in m]
        # A mean that is not yet divided is read as it will be.
        flats = [flat.clone() * mean._factor for flat in mean._flats]
        seen.rounds.append((round, members, round - version, digest(flats)))
        bring(mean)

    handover.take, handover.bring = taken, brought


def _groups(part: GroupAverage, round: int) -> list[tuple[int, ...]]:
    if isinstance(part.among, offbeat.Butterfly):
        return [tuple(group) for group in part.among.groups(round)]
    return [tuple(range(part.among.everyone.size))]
