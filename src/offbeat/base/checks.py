"""Checks of arguments that many values share."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from offbeat.base.errors import BadArgument


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether the value is an int of at least `least`; a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is an int or a float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: int, least: int, most: int) -> None:
    """Refuse a whole number outside these bounds."""
    if not least <= value <= most:
        bound = f"least {least}" if value < least else f"most {most}"
        raise BadArgument(name, value, f"must be at {bound}.")


def check_number(name: str, value: float, most: float, what: str = "a positive number") -> None:
    """Refuse everything but a positive number up to `most`."""
    if not value > 0:  # NaN too
        raise BadArgument(name, value, f"must be {what}.")
    if value > most:
        raise BadArgument(name, value, f"must be at most {most:.15g}.")


def replace_nonfinite(value: Any) -> Any:
    """Return a copy for JSON, in which NaN and infinity, which JSON lacks, are None."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
