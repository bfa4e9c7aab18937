"""Methods written as text: what is understood, and the sentence of each refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Dyadic, optimizer_for
from sentences import says

import offbeat
from offbeat import QSR, Correct, Every, Mean, Never, Replace, Then, method

METHODS = ", ".join(offbeat.methods.__all__)
UNDERSTOOD = "use numbers, strings and "


@pytest.mark.parametrize(
    ("expression", "arguments"),
    [
        ("ddp()", {}),
        ("ddp", {}),
        ("  ddp()\n", {}),
        ("local_sgd(every=8)", {"every": 8}),
        ("local_sgd(every=Every(8))", {"every": Every(8)}),
        ("local_sgd(every=Every(steps=8, offset=2))", {"every": Every(8, offset=2)}),
        ("local_sgd(every=Never())", {"every": Never()}),
        ("local_sgd(every=Then(4, Every(1), Every(8)))", {"every": Then(4, Every(1), Every(8))}),
        ("local_sgd(every=QSR(alpha=0.02, peak=None))", {"every": QSR(alpha=0.02)}),
        ("local_sgd(delay='round', buffers=\"keep\")", {"delay": "round", "buffers": "keep"}),
        ("local_sgd(reduce=Mean(), moments='reset')", {"reduce": Mean(), "moments": "reset"}),
        ("hierarchical(nodes=((0, 1), (2,)))", {"nodes": ((0, 1), (2,))}),
        ("hierarchical(nodes=[[0, 1], [2]])", {"nodes": ((0, 1), (2,))}),
        ("hierarchical(nodes=2, inner=1, outer=16)", {"nodes": 2, "inner": 1, "outer": 16}),
        ("qsr(alpha=1e-2, total=10_000)", {"alpha": 0.01, "total": 10_000}),
        ("qsr(alpha=-0.5)", {"alpha": -0.5}),
        ("qsr(alpha=0.5, peak=True)", {"alpha": 0.5, "peak": True}),
    ],
)
def test_what_is_understood(expression: str, arguments: dict[str, Any]) -> None:
    build = method(expression)
    assert build.arguments == arguments
    assert build.name == expression.strip().partition("(")[0]
    assert method(str(build)) == build


def test_what_is_built() -> None:
    model = Dyadic()
    sync = method("local_sgd(every=3, delay=1)")(model, optimizer_for(model))
    assert repr(sync) == "local_sgd(every=3, delay=1)"
    assert sync.model is model
    solo = offbeat.Solo()
    assert method("ddp")(model, optimizer_for(model), group=solo).parts[0].peers.everyone is solo


def test_values_may_be_written_by_position_and_methods_may_not() -> None:
    assert method("local_sgd(every=QSR(0.5, 2))").arguments == {"every": QSR(alpha=0.5, base=2)}
    with says(ValueError, "method('local_sgd(8)'): name the arguments, as in local_sgd(every=8)."):
        method("local_sgd(8)")


REFUSED = {
    "__import__('os')": f"name one of {METHODS}.",
    "sgd(every=8)": f"name one of {METHODS}.",
    "recorded(8)": f"name one of {METHODS}.",  # it is in methods.py, but not a method
    "offbeat.ddp()": f"name one of {METHODS}.",
    "Every(8)": f"name one of {METHODS}.",
    "8": f"name one of {METHODS}.",
    "ddp()()": f"name one of {METHODS}.",
    "ddp() or ddp()": f"name one of {METHODS}.",
    "(lambda: ddp)()": f"name one of {METHODS}.",
    "[ddp][0]()": f"name one of {METHODS}.",
    "local_sgd(*[8])": "name the arguments, as in local_sgd(every=8).",
    "local_sgd(**{'every': 8})": "** is not supported.",
    "local_sgd(every=Every(**{'steps': 8}))": "** is not supported.",
    "local_sgd(every=8, every=4)": "every= is given twice.",
    "local_sgd(every=Every(8, offset=1, offset=2))": "offset= is given twice.",
    "local_sgd(steps=8)": (
        "local_sgd has no argument 'steps'; it takes every, delay, gain, reduce, buffers, moments, drift, "
        "guard."
    ),
    "ddp(every=8)": "ddp has no argument 'every'; it takes delay, reduce.",
    "ddp(group=None)": "ddp has no argument 'group'; it takes delay, reduce.",
    "ddp(model=None)": "ddp has no argument 'model'; it takes delay, reduce.",
    "ddp(optimizer=None)": "ddp has no argument 'optimizer'; it takes delay, reduce.",
    "qsr(base=4)": "qsr needs alpha=.",
    "qsr": "qsr needs alpha=.",
    "post_local_sgd(every=4)": "post_local_sgd needs switch=.",
    "hierarchical()": "hierarchical needs nodes=.",
    "local_sgd(every=Every())": "Every needs steps=.",
    "local_sgd(every=Every(offset=2, stps=3))": (
        "Every has no argument 'stps' (did you mean 'steps'?); it takes steps, offset, skip."
    ),
    "local_sgd(every=Every(3, steps=2))": "Every: steps= is given twice.",
    "local_sgd(every=Every(3, 2, 1, 0))": "Every takes steps, offset, skip, but 4 values are given.",
    "local_sgd(every=8, reduce=Mean('bfloat16', 8))": "Mean takes dtype, but 2 values are given.",
    "local_sgd(every=Every)": "write Every with brackets, such as Every(...).",
    "ddp(reduce=Quantised(4))": "there is no Quantised (did you mean 'Quantized'?).",
    "local_sgd(every=Evry)": "there is no Evry (did you mean 'Every'?).",
    "ddp(reduce=ErrorFeedback(Quantized(4), limits=1))": (
        "ErrorFeedback has no argument 'limits' (did you mean 'limit'?); it takes code, decay, limit."
    ),
}


@pytest.mark.parametrize(("expression", "sentence"), REFUSED.items(), ids=list(REFUSED))
def test_refusals(expression: str, sentence: str) -> None:
    with says(ValueError, f"method({expression!r}): {sentence}"):
        method(expression)


NOT_UNDERSTOOD = {
    "local_sgd(every=__import__('os').system('true'))": "__import__('os').system('true')",
    "local_sgd(every=print(8))": "print(8)",
    "local_sgd(every=open('x'))": "open('x')",
    "local_sgd(every=Clock(1, 2, 3))": "Clock(1, 2, 3)",
    "local_sgd(every=Schedule())": "Schedule()",
    "local_sgd(every=ddp())": "ddp()",
    "local_sgd(every=eight)": "eight",
    "local_sgd(every=offbeat.Every(8))": "offbeat.Every(8)",
    "local_sgd(every=Every(8).steps)": "Every(8).steps",
    "local_sgd(every=lambda: 8)": "lambda: 8",
    "local_sgd(every=[n for n in (8,)])": "[n for n in (8,)]",
    "local_sgd(every={'steps': 8})": "{'steps': 8}",
    "local_sgd(every=4 + 4)": "4 + 4",
    "local_sgd(every=2 ** 3)": "2 ** 3",
    "local_sgd(every=~8)": "~8",
    "local_sgd(every=not 8)": "not 8",
    "local_sgd(every=-'8')": "-'8'",
    "local_sgd(every=8 if True else 4)": "8 if True else 4",
    "local_sgd(every=f'{8}')": "f'{8}'",
    "local_sgd(every=(n := 8))": "(n := 8)",
    "local_sgd(every=Every(*(8,)))": "*(8,)",
    "local_sgd(every=(1, eight))": "eight",
    "local_sgd(every=-Every(8))": "-Every(8)",
}


@pytest.mark.parametrize(("expression", "culprit"), NOT_UNDERSTOOD.items(), ids=list(NOT_UNDERSTOOD))
def test_what_is_not_understood(expression: str, culprit: str) -> None:
    with pytest.raises(ValueError, match="is not supported") as caught:
        method(expression)
    begin = f"method({expression!r}): {culprit!r} is not supported; use numbers, strings and "
    assert str(caught.value).startswith(begin)
    values = str(caught.value).removeprefix(begin).removesuffix(".").split(", ")
    assert values == sorted(values)
    assert {"Correct", "Every", "Mean", "Never", "QSR", "Replace", "Then"} <= set(values)
    assert "Clock" not in values
    for value in values:
        assert getattr(offbeat, value).__name__ == value  # public, each of them


@pytest.mark.parametrize(
    "expression",
    ["local_sgd(every=8", "", "import os", "local_sgd(every=)", "ddp(); ddp()", "x = ddp()"],
)
def test_what_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match="this is not a valid expression: ") as caught:
        method(expression)
    assert str(caught.value).startswith(f"method({expression!r}): this is not a valid expression: ")
    assert type(caught.value) is ValueError
    assert caught.value.__suppress_context__


def test_the_values_own_sentences_come_through() -> None:
    with says(ValueError, "Every(steps=0): steps must be at least 1."):
        method("local_sgd(every=Every(0))")
    with says(ValueError, "Every(steps=0): steps must be at least 1."):
        method("local_sgd(every=0)")(model := Dyadic(), optimizer_for(model))


def test_values_of_updates_are_understood() -> None:
    """No method takes an update yet; the values are there for those that will."""
    for name, value in {"Replace": Replace, "Correct": Correct}.items():
        assert offbeat.methods.expression.VALUES[name] is value


def test_nothing_is_ever_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr("builtins.eval", forbidden)
    monkeypatch.setattr("builtins.exec", forbidden)
    mark = tmp_path / "mark"
    touch = f"open({str(mark)!r}, 'w')"
    texts = [
        touch,
        f"local_sgd(every={touch})",
        f"local_sgd(every=Every({touch}))",
        f"local_sgd(every=[{touch} for _ in (1,)])",
        f"(lambda: {touch})()",
        f"local_sgd(every=f'{{{touch}}}')".replace(f"'{mark}', 'w'", f'"{mark}", "w"'),
    ]
    for text in texts:
        with pytest.raises(ValueError, match=r"^method\("):
            method(text)
    assert not mark.exists()
    assert method("local_sgd(every=8)").arguments == {"every": 8}


def test_a_method_is_called_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(
        TypeError, match=r"local_sgd has no argument 'evry' \(did you mean 'every'\?\); it takes every, delay"
    ):
        offbeat.local_sgd(model, optimizer_for(model), evry=8)
    with pytest.raises(TypeError, match="positional"):
        offbeat.local_sgd(model, optimizer_for(model), 8)
