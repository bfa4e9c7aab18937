"""A method's call as a value and as text. The text is parsed, never evaluated."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from offbeat import methods, reduce
from offbeat import when as schedule
from offbeat.base.errors import show
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.call import Optimizers, check_numbers
from offbeat.server import rules
from offbeat.update import detached, outer, overlap, update

LONGEST, DEEPEST = 20_000, 30  # characters and levels of an expression
_ABSTRACT = ("Anchored", "Clock", "Code")

VALUES = {
    name: value
    for module in (schedule, reduce, update, outer, overlap, detached, rules)
    for name, value in vars(module).items()
    if inspect.isclass(value) and hasattr(value, "__dataclass_fields__") and name not in _ABSTRACT
}


@dataclass(frozen=True)
class Call:
    """A named method and its arguments. Call it with a model and an optimizer.

    Its text is the call as one would type it, without defaults.

        >>> str(method("diloco(every=Every(50), lr=0.5)").but(every=64))
        'diloco(every=64, lr=0.5)'
    """

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        written = [f"{name}={brief(value)}" for name, value in self.arguments.items()]
        return f"{self.name}({', '.join(written)})"

    def __call__(self, model: nn.Module, optimizer: Optimizers, **group: Any) -> Synchronizer:
        sync: Synchronizer = getattr(methods, self.name)(model, optimizer, **self.arguments, **group)
        return sync

    def takes(self, argument: str) -> bool:
        """Whether the method has this argument."""
        return argument in methods.arguments(getattr(methods, self.name))

    def but(self, **changed: Any) -> Call:
        """The same call with other arguments."""
        return Call(self.name, {**self.arguments, **changed})


def method(expression: str) -> Call:
    """The method named by an expression such as "local_sgd(every=QSR(alpha=0.02))".

    An expression may contain methods, values such as `QSR`, numbers, strings, True, False, None, tuples and
    lists. Call the result with a model and an optimizer.

        build = offbeat.method("local_sgd(every=8)")
        sync = build(model, optimizer)
    """
    tree = parse(expression)
    name, keywords = _method_call(tree, expression)
    accepted = methods.arguments(getattr(methods, name))
    for keyword in keywords:
        if keyword not in accepted:
            choice = ", ".join(accepted)
            raise ValueError(
                f"method({show(expression)}): {name} has no argument {keyword!r}; it takes {choice}."
            )
    for key, default in accepted.items():
        if default is inspect.Parameter.empty and key not in keywords:
            raise ValueError(f"method({show(expression)}): {name} needs {key}=.")
    return Call(name, keywords)


def brief(value: object) -> str:
    """A value as one would type it, without its group and its defaults."""
    if not is_dataclass(value):
        return repr(value)
    given = {f.name: getattr(value, f.name) for f in fields(value) if f.repr and f.name != "group"}
    written = [f"{name}={brief(v)}" for name, v in given.items() if not _is_default(value, name, v)]
    return f"{type(value).__name__}({', '.join(written)})"


def _is_default(value: object, name: str, given: object) -> bool:
    parameter = inspect.signature(type(value)).parameters.get(name)
    return parameter is not None and parameter.default == given


def parse(expression: str) -> ast.expr:
    """The syntax tree of an expression. Refuses text that is longer or deeper than any method needs."""
    if not isinstance(expression, str):
        raise TypeError(
            f"method({show(expression)}): an expression must be a string, such as 'local_sgd(every=8)'."
        )
    text, call = expression.strip(), f"method({show(expression)})"
    if len(text) > LONGEST:
        raise ValueError(f"{call}: an expression has at most {LONGEST} characters, but this has {len(text)}.")
    if _brackets(text) > DEEPEST:
        raise ValueError(f"{call}: an expression has at most {DEEPEST} levels, but this has more.")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:  # a ValueError means the text cannot be encoded
        raise ValueError(f"{call}: this is not a valid expression: {getattr(error, 'msg', error)}.") from None
    except (MemoryError, RecursionError):  # Python's parser gives up on a deep tree
        tree = None
    if tree is None or _depth(tree) > DEEPEST:
        raise ValueError(f"{call}: an expression has at most {DEEPEST} levels, but this has more.")
    return tree


def _brackets(text: str) -> int:
    """The nesting depth of brackets."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _depth(tree: ast.AST) -> int:
    """The depth of a tree, computed without recursion."""
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _method_call(tree: ast.expr, expression: str) -> tuple[str, dict[str, Any]]:
    call = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.func.id not in methods.__all__:
        raise ValueError(f"method({show(expression)}): name one of {', '.join(methods.__all__)}.")
    if call.args:
        raise ValueError(f"method({show(expression)}): name the arguments, as in {call.func.id}(every=8).")
    return call.func.id, _keywords(call, expression)


def _keywords(call: ast.Call, expression: str) -> dict[str, Any]:
    found = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError(f"method({show(expression)}): ** is not supported.")
        if keyword.arg in found:  # ast.parse accepts it
            raise ValueError(f"method({show(expression)}): {keyword.arg}= is given twice.")
        found[keyword.arg] = _value(keyword.value, expression)
    return found


def _number(value: Any, expression: str) -> Any:
    """The value. Refuses numbers that do not fit in 64 bits, because workers compare them."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"method({show(expression)}): {show(value, 40)} is too large.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"method({show(expression)}): {value} is too large.")
    return value


def _value(node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        return _number(node.value, expression)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand, expression)
        if isinstance(number, int | float):
            return -number
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, expression) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in VALUES:
        kind = VALUES[node.func.id]
        args, given = [_value(arg, expression) for arg in node.args], _keywords(node, expression)
        kinds = {name: p.annotation for name, p in inspect.signature(kind).parameters.items()}
        try:
            check_numbers(node.func.id, kinds, dict(zip(kinds, args, strict=False)) | given)
            return kind(*args, **given)
        except TypeError as error:
            text = str(error).replace(".__init__()", "()").removesuffix(".")
            raise ValueError(f"method({show(expression)}): {text}.") from None
    raise ValueError(
        f"method({show(expression)}): {show(ast.unparse(node), 80)} is not supported; use numbers, "
        f"strings and {', '.join(sorted(VALUES))}."
    )
