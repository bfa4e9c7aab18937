"""A grid of runs: methods × workers × periods, each with the same number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offbeat.app.runs.setting import Setting
from offbeat.base.errors import BadArgument
from offbeat.methods.expression import method
from offbeat.tasks import Task


@dataclass(frozen=True)
class Cell:
    """One run of a study, and the curve it belongs to."""

    setting: Setting
    method: str  # as given, without its period
    every: int | None


def with_period(expression: str, every: int) -> str | None:
    """The method with this period; None if it does not take one.

    >>> with_period("slowmo(momentum=0.5)", 8)
    'slowmo(momentum=0.5, every=8)'
    """
    call = method(expression)
    return str(call.but(every=every)) if call.takes("every") else None


def cells(
    first: Setting,
    task: Task,
    *,
    expressions: Sequence[str],
    workers: Sequence[int],
    periods: Sequence[int],
    samples: int,
) -> list[Cell]:
    """All runs of the grid. The steps of each follow from the number of samples."""
    batch = first.batch or task.batch_size
    grid = []
    for expression in expressions:
        for count in workers:
            steps = samples // (max(1, count) * batch)
            if steps < 1:
                reason = f"one step of {count} workers with batches of {batch} needs {count * batch}."
                raise BadArgument("samples", samples, reason)
            for every in periods:
                given = with_period(expression, every)
                setting = replace(first, method=given or expression, workers=count, steps=steps)
                grid.append(Cell(setting, expression, every if given else None))
                if given is None:
                    break
    return grid
