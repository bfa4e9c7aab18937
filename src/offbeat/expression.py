"""Methods written as text: parsed, never evaluated."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

from offbeat import detached, methods, outer, overlap, reduce, schedule, update
from offbeat.server import rules
from offbeat.sync import Synchronizer

_ABSTRACT = ("Anchored", "Clock", "Code")

VALUES = {
    name: value
    for module in (schedule, reduce, update, outer, overlap, detached, rules)
    for name, value in vars(module).items()
    if inspect.isclass(value) and hasattr(value, "__dataclass_fields__") and name not in _ABSTRACT
}


def method(expression: str) -> Callable[..., Synchronizer]:
    """The method that an expression such as "local_sgd(every=QSR(alpha=0.02))" names, to be called with
    model and optimizer.

    Names of methods and values, numbers, strings, True, False, None, tuples and lists are understood.

        build = offbeat.method("local_sgd(every=8)")
        sync = build(model, optimizer)
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"method({expression!r}): this is not an expression: {error.msg}.") from None
    name, keywords = _method_call(tree, expression)
    function = getattr(methods, name)
    accepted = methods.arguments(function)
    for keyword in keywords:
        if keyword not in accepted:
            choice = ", ".join(accepted)
            raise ValueError(
                f"method({expression!r}): {name} has no argument {keyword!r}; it takes {choice}."
            )
    for key, default in accepted.items():
        if default is inspect.Parameter.empty and key not in keywords:
            raise ValueError(f"method({expression!r}): {name} needs {key}=.")
    return functools.partial(function, **keywords)


def _method_call(tree: ast.expr, expression: str) -> tuple[str, dict[str, Any]]:
    call = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.func.id not in methods.__all__:
        raise ValueError(f"method({expression!r}): name one of {', '.join(methods.__all__)}.")
    if call.args:
        raise ValueError(f"method({expression!r}): arguments are named, as in {call.func.id}(every=8).")
    return call.func.id, _keywords(call, expression)


def _keywords(call: ast.Call, expression: str) -> dict[str, Any]:
    found = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError(f"method({expression!r}): ** is not understood here.")
        if keyword.arg in found:  # the parser alone does not mind
            raise ValueError(f"method({expression!r}): {keyword.arg}= is given twice.")
        found[keyword.arg] = _value(keyword.value, expression)
    return found


def _value(node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand, expression)
        if isinstance(number, int | float):
            return -number
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, expression) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in VALUES:
        args = [_value(arg, expression) for arg in node.args]
        try:
            return VALUES[node.func.id](*args, **_keywords(node, expression))
        except TypeError as error:
            text = str(error).replace(".__init__()", "()")
            raise ValueError(f"method({expression!r}): {text}.") from None
    raise ValueError(
        f"method({expression!r}): {ast.unparse(node)!r} is not understood; use numbers, strings and "
        f"{', '.join(sorted(VALUES))}."
    )
