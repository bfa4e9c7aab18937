"""The methods that the tests run. A new method adds rows here and nowhere else in the tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

# The tests of simulation = gloo and of equal replicas run each row on four workers, those of resuming on
# `enough`: ten steps each.
METHODS = [
    "ddp()",
    "ddp(delay=1)",
    "local_sgd(every=3)",
    "local_sgd(every=1)",
    "local_sgd(every=3, delay=2)",
    "local_sgd(every=3, delay=3, gain=0.25)",
    "local_sgd(every=3, delay='round')",
    "local_sgd(every=3, moments='average')",
    "local_sgd(every=4, moments='reset', buffers='keep')",
    "local_sgd(every=Every(4, offset=1), delay=1, moments='average')",
    "post_local_sgd(switch=4, every=3)",
    "hierarchical(nodes=2, inner=1, outer=4)",
    "hierarchical(nodes=((0,), (1, 2), (3,)), inner=2, outer=4)",
    "qsr(alpha=0.5, base=2, warmup=2, total=10)",
    "adaptive(start=2, sample=4)",
    "adacomm(start=4, interval=3)",
    # Workers of these rows have the clock of tests/ticking.py. The period of a budget grows.
    "local_sgd(every=Budget(0.125, least=2))",
    "local_sgd(every=Budget(0.125, least=2), delay=2)",
    "local_sgd(every=Seconds(3))",
    "local_sgd(every=Seconds(2), moments='average', guard=3.0)",
    "diloco(every=Seconds(2), lr=0.5, momentum=0.625, ramp=1, warmup=2)",
    "dasgd(every=3, delay=2, keep=0.5)",
    "cocod(every=3, delay=1)",
    "slowmo(every=3, lr=1.0, momentum=0.625, ramp=1)",
    "slowmo(every=2, lr=0.5, momentum=0.5, ramp=0, moments='average')",
    "diloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
    "diloco(every=3, lr=0.5, momentum=0.5, ramp=0, moments='reset', buffers='keep')",
    "diloco(every=3, lr=0.5, momentum=0.5, ramp=0, clip=1e9, guard=3.0)",
    "local_sgd(every=3, delay=2, guard=3.0)",
    "eager_diloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
    "eager_diloco(every=3, lr=0.5, momentum=0.625, ramp=1, share=0.0)",
    "diloco(every=3, lr=0.5, momentum=0.625, ramp=1, warmup=3)",
    "snoo(every=3, lr=0.5, momentum=0.625, ramp=1)",
    "coda(every=3, stages=(4, 9), gamma=1e+30, decay=2.0)",
    "desloc(every=2, first=3, second=4)",
    "desloc(every=1)",
    "palsgd(every=4, p=0.5, eta=0.5, lr=0.5, momentum=0.5, ramp=0)",
    "palsgd(every=4, p=0.5, eta=0.5, lr=0.5, momentum=0.5, ramp=0, warmup=3)",
    "palsgd(every=4, p=0.5, eta=0.5, lr=0.5, momentum=0.5, ramp=0, shared=False, seed=1)",
    "lookahead_diloco(every=4, inner=2, alpha=0.5, lr=0.5, momentum=0.625, ramp=1)",
    "lookahead_diloco(every=3, inner=2, alpha=0.25, lr=0.5, momentum=0.625, ramp=1, warmup=3)",
    "overlap_local_sgd(every=2, pull=0.5, momentum=0.5)",
    "noloco(every=2, lr=0.5, momentum=0.625, ramp=1)",
    "hierarchical(nodes=2, inner=1, outer=4, update=Outer(SGD(lr=0.5, momentum=0.5)))",
    # With a grace of a minute nobody is late, so real workers do what simulated ones do.
    "wagma(group_size=2, every=3, grace=60.0)",
    "wagma(group_size=4, every=5, grace=60.0, moments='average')",
    "wagma(group_size=1, every=4, buffers='keep')",
    "wagma(group_size=2, every=3, grace=60.0, late='add')",
    "eager_sgd(every=4, grace=60.0)",
    "eager_sgd(every=3, activation='majority', grace=60.0)",
    "gradient_code(grace=60.0)",
    "gradient_code(stragglers=0)",
    "gradient_code(dynamic=True, grace=60.0)",
    # These rows name their server: the default does not fit the optimizer of some tests.
    "ssd_sgd(every=2, warmup=3, alpha=1.0, server=SGD(lr=1.0, momentum=0.5))",
    "ssd_sgd(every=3, warmup=0, beta=0.25, in_flight=1, server=SGD(lr=1.0, momentum=0.5))",
    "ssd_sgd(every=5, warmup=1, local_lr=0.125, in_flight=4, server=SGD(lr=1.0))",
    "od_sgd(warmup=2, server=SGD(lr=1.0, momentum=0.5))",
    "od_sgd(warmup=0, lam=0.0625, in_flight=1, server=SGD(lr=1.0, momentum=0.5, nesterov=True))",
]

# Methods with a code of their own. A code skips small tensors, so these rows are tested with a large one.
OWN_CODES = [
    "streaming_diloco(every=4, fragments=2, delay=1, keep=0.5, lr=0.5, momentum=0.625, ramp=1)",
    "streaming_diloco(every=3, fragments=2, delay=2, keep=0.5, lr=0.5, momentum=0.625, ramp=1)",
    "sparse_loco(every=3)",
    "sparse_loco(every=2, ratio=8, decay=0.5, lr=0.5)",
    "def_sgd(ratio=2, lam=0.25)",
]

# Codes round, so values are no longer dyadic: real and simulated rounds agree to the bit, the last mean
# agrees to rounding. The tests have small tensors, hence least=1.
CODES = [
    *OWN_CODES,
    "ddp(reduce=Quantized(8, block=8, least=1))",
    "ddp(reduce=ErrorFeedback(Quantized(4, block=8, stochastic=True, least=1), limit=0.25))",
    "local_sgd(every=3, reduce=Mean('bfloat16', least=1))",
    "local_sgd(every=3, delay=2, reduce=ErrorFeedback(Mean('float16', least=1)))",
    "local_sgd(every=3, delay='round', reduce=ErrorFeedback(Quantized(4, block=8, least=1)))",
    "local_sgd(every=3, reduce=ErrorFeedback(TopK(3, least=1)))",
    "local_sgd(every=3, reduce=ErrorFeedback(RandomBlock(2, least=1), decay=0.5))",
    "dasgd(every=3, delay=1, reduce=Quantized(8, block=8, least=1))",
    "hierarchical(nodes=2, inner=1, outer=4, reduce=Quantized(8, block=8, least=1))",
    "slowmo(every=3, ramp=1, reduce=ErrorFeedback(TopK(4, chunk=8, bits=2, least=1), decay=0.9))",
    "diloco(every=3, lr=0.5, momentum=0.625, ramp=1, reduce=Quantized(4, block=8, least=1))",
    "streaming_diloco(every=4, fragments=2, delay=2, reduce=ErrorFeedback(Quantized(4, block=8, least=1)))",
    "eager_diloco(every=3, lr=0.5, momentum=0.625, ramp=1, reduce=Quantized(8, block=8, least=1))",
    "palsgd(every=4, p=0.5, lr=0.5, momentum=0.625, ramp=1, reduce=Quantized(8, block=8, least=1))",
    "def_sgd(lam=0.25, every=2, reduce=Quantized(4, block=8, least=1))",
    "diloco(every=Seconds(3), lr=0.5, momentum=0.625, reduce=ErrorFeedback(Quantized(4, block=8, least=1)))",
]

# Every round averages rounded numbers: real and simulated runs agree to rounding.
ROUNDED = [
    "def_sgd(lam=0.5, every=3, reduce=RandomBlock(2, least=1))",
    "a2sgd(every=3)",
    "a2sgd(every=3, reduce=Quantized(8, block=8, least=1))",
]

# These round without a code.
PULLED = [
    "coda(every=3, stages=(2, 3, 9), gamma=4.0)",
    "gradient_code(stragglers=2, clusters=1, grace=60.0)",  # a cyclic code of four
]
METHODS += CODES + ROUNDED + PULLED

# The first row of every method.
EACH = list({row.partition("(")[0]: row for row in reversed(METHODS)}.values())[::-1]
# All rows again, for tests that take long: the fast part runs the first row of each method.
ROWS = [pytest.param(row, marks=[] if row in EACH else pytest.mark.slow) for row in METHODS]
# The first row of every method, option, clock and code, for tests that take longer.
OPTIONS = ("buffers=", "clip=", "delay='round'", "gain=", "guard=", "moments='average'", "moments='reset'")
OPTIONS += ("shared=", "update=", "warmup=", "Budget(", "Seconds(")
OPTIONS += ("ErrorFeedback(", "Mean('", "Quantized(", "RandomBlock(", "TopK(")
_SHOWN = {next((row for row in METHODS if option in row), "") for option in OPTIONS}
BROAD = [row for row in METHODS if row in EACH or row in _SHOWN]

# Between global rounds, workers of these methods may be in different rounds: save at global rounds only.
SAVE_EVERY = {
    row: int(row.split("every=")[1][0]) for row in METHODS if row.startswith(("wagma", "eager_sgd"))
}


def enough(expression: str) -> int:
    """The fewest workers that show all a method does: four if they meet in groups, otherwise two."""
    return 4 if expression.startswith(("hierarchical", "noloco", "wagma")) or "clusters=" in expression else 2


def savable(expression: str, step: int) -> bool:
    return step % SAVE_EVERY.get(expression, 1) == 0


@dataclass(frozen=True)
class Law:
    """Two calls that must train alike, step by step: to the bit, or up to rounding.

    `wide`: the model has a tensor that is large enough for the default `least` of a code.
    """

    this: str
    that: str
    exact: bool = True
    wide: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.this} = {self.that}"


TOO_SMALL = "ddp(reduce=Quantized(4))"
FLOATS = {"optimizer": "momentum", "decay": 0.9}
ADAMW = {"optimizer": "adamw", "decay": 0.9}

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
    Law("adaptive(start=3, sample=1000)", "local_sgd(every=3)", options=FLOATS),
    Law("adaptive(start=2, sample=4)", "local_sgd(every=Adaptive(start=2, sample=4))", options=FLOATS),
    Law("adacomm(start=3, interval=1000)", "local_sgd(every=3)", options=FLOATS),
    # Communication that may take nearly all of the time, and a period that cannot grow.
    Law("local_sgd(every=Budget(0.99, least=3))", "local_sgd(every=3)", options=FLOATS),
    Law("diloco(every=Budget(0.01, least=2, most=2))", "diloco(every=2)", options=FLOATS),
    # Workers of equal speed make equal numbers of steps. The time begins with the first gradient.
    Law("local_sgd(every=Seconds(3))", "local_sgd(every=Then(1, Never(), Every(3)))", options=FLOATS),
    Law("dasgd(every=3, delay=0, keep=0.0)", "local_sgd(every=3)", options=FLOATS),
    Law("cocod(every=3, delay=2)", "local_sgd(every=3, delay=2, gain=1.0)", options=FLOATS),
    Law("local_sgd(every=3, gain=0.25)", "local_sgd(every=3)", options=FLOATS),
    Law("cocod(every=3, delay=0)", "local_sgd(every=3)"),
    # The outer step of one worker, which adds nothing if it goes all the way or has not come yet.
    Law(
        "snoo(every=3, lr=0.5, momentum=0.625, ramp=1)",
        "diloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
        options={**FLOATS, "workers": 1},
    ),
    Law("snoo(every=3, lr=1.0, momentum=0.0)", "ddp()"),
    Law("snoo(every=100)", "ddp()", options=FLOATS),
    # A stage without an end or a pull.
    Law("coda(every=3, stages=1000, gamma=1e+30)", "local_sgd(every=3)", exact=False, options=FLOATS),
    # Moments that come with the parameters, or never.
    Law("desloc(every=3, first=3, second=3)", "local_sgd(every=3, moments='average')", options=ADAMW),
    Law("desloc(every=3, first=3)", "local_sgd(every=3, moments='average')", options=FLOATS),
    Law("desloc(every=3, first=Never(), second=Never())", "local_sgd(every=3)", options=ADAMW),
    Law("desloc(every=2, first=6, second=12)", "desloc(every=Every(2))", options=ADAMW),
    # The outer step with rate 1 and no momentum is averaging; SlowMo at a constant rate is outer momentum.
    Law("diloco(every=3, lr=1.0, momentum=0.0)", "local_sgd(every=3)"),
    Law("slowmo(every=3, lr=1.0, momentum=0.0)", "local_sgd(every=3)"),
    Law("diloco(every=3, clip=1e9, guard=3.0)", "diloco(every=3)", options=FLOATS),
    Law(
        "slowmo(every=3, lr=0.5, momentum=0.625, ramp=1)",
        "hierarchical(nodes=1, inner=3, outer=3, update=Outer(SGD(lr=0.5, momentum=0.625, ramp=1)))",
    ),
    Law(
        "hierarchical(nodes=1, inner=1, outer=3, update=Outer(SGD(lr=0.7, momentum=0.9, nesterov=True)))",
        "diloco(every=3, ramp=0)",
        options=FLOATS,
    ),
    Law("streaming_diloco(every=3, fragments=1, delay=0, reduce=Mean())", "diloco(every=3)", options=FLOATS),
    Law(
        "streaming_diloco(every=3, fragments=1, delay=0, reduce=Quantized(4, least=1))",
        "diloco(every=3, reduce=Quantized(4, least=1))",
        options=FLOATS,
    ),
    # Slow weights that go all the way, or that never come, leave DiLoCo.
    Law(
        "lookahead_diloco(every=4, inner=2, alpha=1.0, lr=0.5, momentum=0.5, ramp=0)",
        "diloco(every=4, lr=0.5, momentum=0.5, ramp=0)",
    ),
    Law("lookahead_diloco(every=3, inner=100)", "diloco(every=3)", options=FLOATS),
    Law("lookahead_diloco(every=3, warmup=100)", "ddp()", options=FLOATS),
    Law("palsgd(every=3, p=0.0)", "diloco(every=3)", options=FLOATS),
    Law("palsgd(every=3, p=0.0, shared=False)", "diloco(every=3)", options=FLOATS),
    Law("palsgd(every=3, p=0.5, warmup=100)", "ddp()", options=FLOATS),
    Law("diloco(every=3, warmup=100)", "ddp()", options=FLOATS),
    Law("slowmo(every=3, warmup=100)", "ddp()", options=FLOATS),
    Law("diloco(every=3, warmup=4, lr=0.5)", "palsgd(every=3, warmup=4, lr=0.5, p=0.0)", options=FLOATS),
    Law("slowmo(every=3, warmup=4, momentum=0.0)", "post_local_sgd(switch=4, every=3)"),
    Law("diloco(every=QSR(alpha=0.0, base=3))", "diloco(every=3)", options=FLOATS),
    Law("slowmo(every=Adaptive(start=3, sample=1000))", "slowmo(every=3)", options=FLOATS),
    # Without momentum the anchor is the mean of the round before; at first it is where everyone starts.
    Law(
        "overlap_local_sgd(every=3, pull=0.5, momentum=0.0)",
        "dasgd(every=3, delay='round', keep=0.5)",
        options={"idle": 3, "finish": False},
    ),
    Law(
        "eager_diloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
        "diloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
        options={"workers": 1, "finish": False},
    ),
    Law(
        "eager_diloco(every=3, lr=1.0, momentum=0.0, ramp=0, share=1.0)",
        "cocod(every=3, delay='round')",
        options={"finish": False},
    ),
    # Two workers are always each other's partner; with equal anchors that is an outer step among all.
    Law(
        "noloco(every=3, lr=0.5, momentum=0.625, ramp=1)",
        "hierarchical(nodes=1, inner=3, outer=3, update=Outer(SGD(lr=0.5, momentum=0.625, ramp=1)))",
        options={"workers": 2},
    ),
    # Workers that need no time at all are never late.
    Law("wagma(group_size=1, every=3)", "local_sgd(every=3)", options=FLOATS),
    Law(
        "wagma(group_size=4, every=3)",
        "local_sgd(every=1)",
        exact=False,
        options={**FLOATS, "buffers": False},
    ),
    Law("wagma(every=1)", "local_sgd(every=1)", options=FLOATS),
    Law("wagma(group_size=4, every=3, grace=0.0)", "ddp()", options={"buffers": False}),
    Law("wagma(every=3, grace=0.5)", "wagma(group_size=2, every=3, grace=0.0)", options=FLOATS),
    Law("wagma(every=3, late='add')", "wagma(every=3)", options={"buffers": False}),
    Law("wagma(every=3, late='add')", "wagma(every=3)", exact=False, options={**FLOATS, "buffers": False}),
    Law("eager_sgd(every=3)", "ddp()", options={"buffers": False}),
    Law("eager_sgd(every=3)", "eager_sgd(every=3, activation='majority')", options=FLOATS),
    # With nothing repeated, all answers are needed; tests/test_coding.py has the law for late workers.
    Law("gradient_code(stragglers=0)", "ddp()", options={**FLOATS, "buffers": False}),
    Law("gradient_code(stragglers=0, dynamic=True)", "ddp()", options={"buffers": False}),
    Law("gradient_code(grace=1.0, dynamic=True)", "gradient_code(clusters=2, grace=1.0)", options=FLOATS),
    # Codes that have nothing large enough to work on are the mean.
    Law(TOO_SMALL, "ddp()"),
    # Codes that lose nothing are the mean.
    Law("local_sgd(every=3, reduce=TopK(1, least=1))", "local_sgd(every=3)"),
    Law("local_sgd(every=3, reduce=RandomBlock(1, least=1))", "local_sgd(every=3)"),
    Law("local_sgd(every=3, delay=2, reduce=RandomBlock(1, least=1))", "local_sgd(every=3, delay=2)"),
    Law("cocod(every=3, delay=2, reduce=RandomBlock(1, least=1))", "cocod(every=3, delay=2)"),
    Law("dasgd(every=3, delay=2, reduce=RandomBlock(1, least=1))", "dasgd(every=3, delay=2)"),
    Law("def_sgd(ratio=1, every=3)", "local_sgd(every=3)", wide=True),
    Law("def_sgd(every=3, reduce=RandomBlock(1, least=1))", "local_sgd(every=3)"),
    # Methods that come with a code are others with this code.
    Law(
        "sparse_loco(every=3)",
        "diloco(every=3, lr=1.5, momentum=0.0, "
        "reduce=ErrorFeedback(TopK(64, chunk=4096, bits=2), decay=0.95))",
        wide=True,
        options=FLOATS,
    ),
    Law(
        "streaming_diloco(every=3, fragments=1, delay=0)",
        "diloco(every=3, reduce=Quantized(4))",
        wide=True,
        options=FLOATS,
    ),
    Law(
        "def_sgd(ratio=4, lam=0.0, every=3)",
        "local_sgd(every=3, reduce=ErrorFeedback(RandomBlock(4)))",
        wide=True,
        options={**FLOATS, "finish": False},
    ),
    # The road by an anchor is the one averaging methods take by themselves.
    Law(
        "local_sgd(every=3, reduce=Quantized(4, least=1))",
        "diloco(every=3, lr=1.0, momentum=0.0, reduce=Quantized(4, least=1))",
        options=FLOATS,
    ),
    Law(
        "post_local_sgd(switch=0, every=3, reduce=Mean('bfloat16', least=1))",
        "qsr(alpha=0.0, base=3, reduce=Mean('bfloat16', least=1))",
        options=FLOATS,
    ),
    Law(
        "adacomm(start=3, interval=1000, reduce=Quantized(8, least=1))",
        "local_sgd(every=3, reduce=Quantized(8, least=1))",
        options=FLOATS,
    ),
    # Nothing detached is error feedback; what is left at the end is another matter.
    Law(
        "def_sgd(lam=0.0, every=3, reduce=RandomBlock(2, least=1))",
        "local_sgd(every=3, reduce=ErrorFeedback(RandomBlock(2, least=1)))",
        options={**FLOATS, "finish": False},
    ),
    # What error feedback keeps by default depends on the code and on what is sent.
    Law(
        "ddp(reduce=ErrorFeedback(Quantized(2, block=8, least=1)))",
        "ddp(reduce=ErrorFeedback(Quantized(2, block=8, least=1), decay=0.5))",
        options=FLOATS,
    ),
    Law(
        "local_sgd(every=3, reduce=ErrorFeedback(Quantized(2, block=8, least=1)))",
        "local_sgd(every=3, reduce=ErrorFeedback(Quantized(2, block=8, least=1), decay=1.0))",
        options=FLOATS,
    ),
    Law(
        "ddp(reduce=ErrorFeedback(RandomBlock(2, least=1)))",
        "ddp(reduce=ErrorFeedback(RandomBlock(2, least=1), decay=1.0))",
        options=FLOATS,
    ),
    # One worker's two means are everybody's.
    Law("a2sgd(every=3)", "ddp()", options={"workers": 1, **FLOATS}),
    # A message in flight for no time at all corrects by exactly what averaging would have changed.
    Law("local_sgd(every=3, delay='round')", "local_sgd(every=3, delay=3)", options=FLOATS),
    # A server that is always pulled from is a synchronous optimizer; buffers stay with their workers.
    Law("ssd_sgd(warmup=100)", "ddp()", exact=False, options={**FLOATS, "buffers": False}),
    Law("od_sgd(warmup=100)", "ddp()", exact=False, options={**FLOATS, "buffers": False}),
    Law("ssd_sgd(every=1, warmup=3, alpha=1.0, beta=0.0)", "od_sgd(warmup=3)", options=FLOATS),
    Law("od_sgd(warmup=3, lam=0.0, server=SGD(lr=1.0))", "od_sgd(warmup=3)", options={}),
    Law("ssd_sgd(every=3, warmup=2, in_flight=1)", "ssd_sgd(every=3, warmup=2, in_flight=5)", options=FLOATS),
    # One heavy-ball step ahead of the server is where the server itself arrives, if nobody else pushes.
    Law(
        "ssd_sgd(every=1, warmup=0, alpha=1.0, beta=0.5)",
        "ddp()",
        exact=False,
        options={**FLOATS, "workers": 1},
    ),
]

# One worker is the plain optimizer, to the bit.
ALONE = [
    "ddp()",
    "local_sgd(every=3)",
    "local_sgd(every=3, delay=2)",
    "local_sgd(every=3, delay='round', gain=0.25, moments='average')",
    "post_local_sgd(switch=4, every=3)",
    "hierarchical(nodes=1, inner=1, outer=4)",
    "qsr(alpha=0.5, base=2)",
    "adaptive(start=2, sample=5)",
    "cocod(every=3, delay=2)",
    "desloc(every=1)",
    "coda(every=3, stages=1000, gamma=1e+30)",
    "wagma(every=3)",
    "eager_sgd(every=3)",
    "gradient_code()",
    "ddp(reduce=Quantized(4, least=1))",
    "local_sgd(every=3, delay=2, reduce=ErrorFeedback(TopK(4, least=1)))",
    "a2sgd(every=3)",
]
