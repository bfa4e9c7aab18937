"""A method's call as a value and as text. The text is parsed, never evaluated."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from offbeat import methods, reduce
from offbeat import when as schedule
from offbeat.base.errors import BadArgument, show, suggest
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.parts import Optimizers, check_names, check_numbers
from offbeat.server import rules
from offbeat.update import outer, update

LONGEST, DEEPEST = 20_000, 30  # characters and levels of an expression

VALUES = {
    name: value
    for module in (schedule, reduce, update, outer, rules)
    for name, value in vars(module).items()
    if inspect.isclass(value) and is_dataclass(value) and name not in ("Anchored", "Clock", "Code")
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
        return f"{self.name}({', '.join(f'{name}={brief(value)}' for name, value in self.arguments.items())})"

    def __call__(self, model: nn.Module, optimizer: Optimizers, **group: Any) -> Synchronizer:
        try:
            sync: Synchronizer = getattr(methods, self.name)(model, optimizer, **self.arguments, **group)
        except BadArgument as error:  # of the method: the command line has other options of the same name
            raise ValueError(str(error)) from error
        return sync

    def takes(self, argument: str) -> bool:
        """Whether the method has this argument."""
        return argument in methods.arguments(getattr(methods, self.name))

    def but(self, **changed: Any) -> Call:
        """Return the same call with other arguments."""
        return Call(self.name, {**self.arguments, **changed})


def brief(value: object) -> str:
    """Write a value as one would type it, without its group and its defaults."""
    if not is_dataclass(value):
        return repr(value)
    defaults = {name: p.default for name, p in inspect.signature(type(value)).parameters.items()}
    given = {f.name: getattr(value, f.name) for f in fields(value) if f.repr and f.name != "group"}
    written = [
        f"{name}={brief(v)}" for name, v in given.items() if defaults.get(name, inspect.Parameter.empty) != v
    ]
    return f"{type(value).__name__}({', '.join(written)})"


def method(expression: str) -> Call:
    """Return the method named by an expression such as "local_sgd(every=QSR(alpha=0.02))".

    An expression may contain methods, values such as `QSR`, numbers, strings, True, False, None, tuples and
    lists. Call the result with a model and an optimizer.

        build = offbeat.method("local_sgd(every=8)")
        sync = build(model, optimizer)
    """
    where = f"method({show(expression)})"
    if not isinstance(expression, str):
        raise TypeError(f"{where}: an expression must be a string, such as 'local_sgd(every=8)'.")
    try:
        tree = _parse(expression.strip())
        call = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
        if not isinstance(call.func, ast.Name) or (name := call.func.id) not in methods.__all__:
            meant = suggest(call.func.id, methods.__all__) if isinstance(call.func, ast.Name) else ""
            raise TypeError(f"name one of {', '.join(methods.__all__)}{meant}.")
        if call.args:
            raise TypeError(f"name the arguments, as in {name}(every=8).")
        given = _read_keywords(call)
        check_names(name, methods.arguments(getattr(methods, name)), given)
        return Call(name, given)
    except TypeError as error:  # from the parser, or from a value
        text = str(error).replace(".__init__()", "()").removesuffix(".")
        raise ValueError(f"{where}: {text}.") from None


def _parse(text: str) -> ast.expr:
    """Return the syntax tree. Refuses text that is longer or deeper than any method needs."""
    if len(text) > LONGEST:
        raise TypeError(f"an expression has at most {LONGEST} characters, but this has {len(text)}.")
    too_deep = TypeError(f"an expression has at most {DEEPEST} levels, but this has more.")
    if max(accumulate((sign in "([{") - (sign in ")]}") for sign in text), default=0) > DEEPEST:
        raise too_deep
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:  # a ValueError means the text cannot be encoded
        raise TypeError(f"this is not a valid expression: {getattr(error, 'msg', error)}.") from None
    except (MemoryError, RecursionError):  # Python's parser gives up on a deep tree
        raise too_deep from None
    depth, level = 0, list[ast.AST]([tree])
    while level:
        depth, level = depth + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    if depth > DEEPEST:
        raise too_deep
    return tree


def _read_keywords(call: ast.Call) -> dict[str, Any]:
    found = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise TypeError("** is not supported.")
        if keyword.arg in found:  # ast.parse accepts it
            raise TypeError(f"{keyword.arg}= is given twice.")
        found[keyword.arg] = _read_value(keyword.value)
    return found


def _read_call(name: str, args: list[Any], given: dict[str, Any]) -> Any:
    """Return the value, such as `Every(8)`, once its arguments have been checked like those of a method."""
    known = inspect.signature(VALUES[name]).parameters
    ordered = [key for key, p in known.items() if p.kind is not p.KEYWORD_ONLY]
    if len(args) > len(ordered):
        raise TypeError(f"{name} takes {', '.join(ordered)}, but {len(args)} values are given.")
    placed = dict(zip(ordered, args, strict=False))
    if twice := placed.keys() & given.keys():
        raise TypeError(f"{name}: {min(twice)}= is given twice.")
    check_names(name, {key: p.default for key, p in known.items()}, placed | given)
    check_numbers(name, {key: p.annotation for key, p in known.items()}, placed | given)
    return VALUES[name](*args, **given)


def _read_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            # Workers compare numbers, so they must fit in 64 bits.
            if (isinstance(number, int) and number.bit_length() > 63) or not math.isfinite(number):
                raise TypeError(f"{show(number, 40)} is too large.")
            return number
        case ast.Constant(value=str() | None as constant):
            return constant
        case ast.UnaryOp(op=ast.USub()) if isinstance(number := _read_value(node.operand), int | float):
            return -number
        case ast.Tuple() | ast.List():
            return tuple(map(_read_value, node.elts))
        case ast.Call(func=ast.Name(id=name)) if name in VALUES:
            return _read_call(name, [_read_value(arg) for arg in node.args], _read_keywords(node))
        case ast.Name(id=name) if name in VALUES:
            raise TypeError(f"write {name} with brackets, such as {name}(...).")
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name) if meant := suggest(name, VALUES):
            raise TypeError(f"there is no {name}{meant}.")
    names = ", ".join(sorted(VALUES))
    raise TypeError(f"{show(ast.unparse(node), 80)} is not supported; use numbers, strings and {names}.")
