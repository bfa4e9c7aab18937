"""One sentence on a comparison: which methods reached the target, and how soon."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.app.runs.summary import REACHED, Row

NAMED = 3  # methods after the fastest, at most


def verdict(rows: Sequence[Row], reference: str | None, *, to_loss: float | None = None) -> str:
    """Who was first to the loss of the reference, or to the given loss; nothing if there is one method."""
    base = next((row for row in rows if row.method == reference), None)
    if base is None or len(rows) == 1:
        return ""
    if to_loss is None and base.reached is None:
        return f"{base.method} diverged, so there is no loss to reach."
    others = [row for row in rows if row is not base]
    arrived = sorted((row.reached, row.method) for row in others if row.reached is not None)
    near = f"the loss of {base.method} (within {100 * REACHED:g} %)"
    goal = near if to_loss is None else f"a loss of {to_loss:g}"
    if 0.0 in (base.reached, *[seconds for seconds, _ in arrived]):
        return f"The untrained model is already at {goal}, so the times say nothing."
    if not arrived:
        return _nobody(base, others, goal, to_loss)
    seconds, fastest = arrived[0]
    if base.reached is not None and base.reached <= seconds:
        first = f"Nothing reached {goal} sooner than {base.method} itself, in {base.reached:.2f} s"
        return f"{first}; next was {fastest}, in {seconds:.2f} s."
    instead = "" if base.reached is None else f" instead of {base.reached:.2f} s"
    if instead and to_loss is not None:
        instead += f" with {base.method}"
    return f"{fastest} reached {goal} in {seconds:.2f} s{instead}{_also(arrived[1:], others, base)}."


def trade_off(curves: Sequence[Mapping[str, Any]]) -> str:
    """Which point of a study sent least among those that came close to the lowest loss. Points are as in
    the page: megabytes, loss, accuracy, period."""
    points = [
        (loss, sent, f"{curve['name']}{'' if every is None else f', period {every}'}")
        for curve in curves
        for sent, loss, _, every in curve["points"]
        if math.isfinite(loss)
    ]
    if len(points) < 2:
        return ""
    lowest, most, best = min(points)
    near = [point for point in points if point[0] <= lowest + REACHED * abs(lowest)]
    loss, least, cheapest = min(near, key=lambda point: point[1])
    start = f"The lowest loss, {lowest:.4f}, is that of {best} ({most:.2f} MB per worker)"
    if cheapest == best:
        return f"{start}; nothing within {100 * REACHED:g} % of it sent less."
    return f"{start}; {cheapest} came within {100 * REACHED:g} % of it ({loss:.4f}) and sent {least:.2f} MB."


def _also(later: Sequence[tuple[float, str]], others: Sequence[Row], base: Row) -> str:
    """What the sentence says of the others."""
    if not later:
        return "; nothing else did" if len(others) > 1 or base.reached is None else ""
    names = [f"{method} ({seconds:.2f} s)" for seconds, method in later[:NAMED]]
    if len(later) > NAMED:
        names.append(f"{len(later) - NAMED} more")
    return f"; {', '.join(names[:-1])}{' and ' if names[1:] else ''}{names[-1]} did, too"


def _nobody(base: Row, others: Sequence[Row], goal: str, to_loss: float | None) -> str:
    """The sentence if no method but perhaps the reference has arrived."""
    alone = base.reached is not None
    left = [row for row in (others if alone else [base, *others]) if math.isfinite(row.loss)]
    closest = ""
    if left:
        near = min(left, key=lambda row: row.loss)
        closest = f"; the closest was {near.method}, with {near.loss:.4f}"
    goal += " with all seeds" if base.seeds > 1 else ""
    if to_loss is None:
        return f"Nothing else reached {goal}{closest and f'{closest} instead of {base.loss:.4f}'}."
    if alone:
        return f"Only {base.method} reached {goal}, in {base.reached:.2f} s{closest}."
    return f"Nothing reached {goal}{closest}."
