"""Checks of arguments that many values share."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from offbeat.base.errors import BadArgument


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether the value is an int of at least `least`; a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def check_whole(name: str, value: int, least: int, most: int) -> None:
    """Refuse a whole number outside these bounds."""
    if value < least:
        raise BadArgument(name, value, f"at least {least} is needed.")
    if value > most:
        raise BadArgument(name, value, f"at most {most} is possible.")


def check_number(name: str, value: float, most: float, what: str = "a positive number") -> None:
    """Refuse everything but a positive number up to `most`."""
    if not value > 0:  # NaN too
        raise BadArgument(name, value, f"{what} is needed.")
    if value > most:
        raise BadArgument(name, value, f"at most {most:g} is possible.")


def replace_nonfinite(value: Any) -> Any:
    """A copy for JSON, which has no NaN and no infinity: they become None."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
