"""The methods, as the tests see them. A new method adds rows here, and nowhere else in the tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Run by the tests of resuming, of simulation = gloo, and of equal replicas: four workers, ten steps.
METHODS = [
    "ddp()",
    "local_sgd(every=3)",
    "local_sgd(every=1)",
    "local_sgd(every=3, delay=2)",
    "local_sgd(every=3, delay=3)",
    "local_sgd(every=3, delay='round')",
    "local_sgd(every=3, moments='average')",
    "local_sgd(every=4, moments='reset', buffers='keep')",
    "local_sgd(every=Every(4, offset=1), delay=1, moments='average')",
    "post_local_sgd(switch=4, every=3)",
    "hierarchical(nodes=2, inner=1, outer=4)",
    "hierarchical(nodes=((0,), (1, 2), (3,)), inner=2, outer=4)",
    "qsr(alpha=0.5, base=2, warmup=2, total=10)",
]


@dataclass(frozen=True)
class Law:
    """Two calls that must train alike, step by step: to the bit, or up to rounding."""

    this: str
    that: str
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.this} = {self.that}"


FLOATS = {"optimizer": "momentum", "decay": 0.9}

LAWS = [
    # With plain SGD, averaging the parameters after every step is averaging the gradients.
    Law("local_sgd(every=1)", "ddp()", options={"buffers": False}),
    Law("qsr(alpha=0.0, base=3)", "local_sgd(every=3)", options=FLOATS),
    Law("qsr(alpha=0.5, base=2)", "local_sgd(every=QSR(alpha=0.5, base=2))", options=FLOATS),
    Law("post_local_sgd(switch=100)", "ddp()", options=FLOATS),
    Law("post_local_sgd(switch=0, every=3)", "local_sgd(every=3)", options=FLOATS),
    Law("post_local_sgd(switch=0, every=Every(3))", "post_local_sgd(switch=0, every=3)", options=FLOATS),
    Law("hierarchical(nodes=4, inner=3, outer=3)", "local_sgd(every=3)", options=FLOATS),
    Law("hierarchical(nodes=1, inner=1, outer=3)", "local_sgd(every=3)", options=FLOATS),
    Law("hierarchical(nodes=4, inner=1, outer=2)", "local_sgd(every=1)", options=FLOATS),
    Law("hierarchical(nodes=((0, 1), (2, 3)), inner=1, outer=4)", "hierarchical(nodes=2, inner=1, outer=4)"),
    # A message in the air for no time at all corrects by exactly what averaging would have changed.
    Law("local_sgd(every=3, delay='round')", "local_sgd(every=3, delay=3)", options=FLOATS),
]

# One worker is the plain optimizer, to the bit.
ALONE = [
    "ddp()",
    "local_sgd(every=3)",
    "local_sgd(every=3, delay=2)",
    "local_sgd(every=3, delay='round', moments='average')",
    "post_local_sgd(switch=4, every=3)",
    "hierarchical(nodes=1, inner=1, outer=4)",
    "qsr(alpha=0.5, base=2)",
]
