"""Each method with its novelty switched off equals a simpler one."""

from __future__ import annotations

import pytest
import torch
from problems import Dyadic, Realistic, Wide, data, optimizer_for, same, simulated, snapshot, train
from table import ALONE, LAWS, METHODS, ROWS, Law

import offbeat

# The laws share their runs, so one process runs them all.
pytestmark = pytest.mark.xdist_group("laws")


@pytest.mark.few(38)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_laws(law: Law) -> None:
    options = dict(law.options)
    with_buffers = options.pop("buffers", True)
    if law.wide:
        options["model"] = Wide
    these, those = simulated(law.this, **options), simulated(law.that, **options)
    for mine, other in zip(these, those, strict=True):
        for step, (a, b) in enumerate(zip(mine, other, strict=True)):
            for name in a:
                if not with_buffers and name in ("average", "count"):
                    continue
                close = torch.equal if law.exact else torch.allclose
                assert close(a[name], b[name]), f"{name} after step {step + 1}"


def test_every_method_stands_in_the_tables() -> None:
    laws = [side for law in LAWS for side in (law.this, law.that)]
    for name in offbeat.methods.__all__:
        for rows in (METHODS, laws):
            assert any(row.startswith(f"{name}(") for row in rows), f"{name} is missing in tests/table.py"


@pytest.mark.few(12)
@pytest.mark.parametrize("expression", ALONE)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_one_worker_is_the_plain_optimizer(expression: str, optimizer: str) -> None:
    torch.manual_seed(0)
    plain = Realistic()
    opt = optimizer_for(plain, optimizer)
    expected = []
    for step in range(10):
        plain(data(0, step)).backward()
        opt.step()
        opt.zero_grad()
        expected.append(snapshot(plain))
    torch.manual_seed(0)
    trace = train(offbeat.Solo(), expression, model=Realistic, optimizer=optimizer, finish=False)
    assert all(same(a, b) for a, b in zip(trace, expected, strict=True))


@pytest.mark.few(10)
@pytest.mark.parametrize("expression", ROWS)
def test_workers_are_equal_in_the_end(expression: str) -> None:
    """After seven steps, which no period of the table divides except 1."""
    ends = [trace[-1] for trace in simulated(expression, model=Dyadic, optimizer="momentum", steps=7)]
    floats = [{k: v for k, v in end.items() if v.is_floating_point()} for end in ends]
    assert all(same(floats[0], other) for other in floats)


@pytest.mark.parametrize(
    ("expression", "rounds"),
    [
        ("local_sgd(every=3)", [3, 6, 9]),
        ("post_local_sgd(switch=4, every=3)", [1, 2, 3, 4, 7, 10]),
        ("hierarchical(nodes=2, inner=1, outer=4)", [4, 8]),
    ],
)
def test_replicas_are_bit_equal_after_global_rounds_and_only_then(expression: str, rounds: list[int]) -> None:
    traces = simulated(expression, model=Realistic, optimizer="momentum")
    for step in range(10):
        weights = [{k: v for k, v in trace[step].items() if v.is_floating_point()} for trace in traces]
        equal = all(same(weights[0], other) for other in weights)
        assert equal == (step + 1 in rounds), f"step {step + 1}"
