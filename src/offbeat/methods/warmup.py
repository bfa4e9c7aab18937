"""A synchronous beginning for methods whose workers step alone afterwards."""

from __future__ import annotations

from torch import nn

from offbeat.among import Group, World
from offbeat.base.checks import is_whole
from offbeat.base.tensors import grads
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.when import Every, Never, Schedule, Then


def synchronous(model: nn.Module, steps: int, group: Group) -> list[Part]:
    """Gradients are averaged in the first so many steps."""
    if not is_whole(steps, 0):
        raise ValueError(f"{steps!r} synchronous steps: a whole number, 0 or more, is needed.")
    when = Then(steps, Every(1), Never())
    return [Exchange(grads(model), when=when, among=World(group), buffers="follow")] if steps else []


def after(steps: int, when: Schedule) -> Schedule:
    """A schedule that begins once so many steps are done."""
    return Then(steps, Never(), when) if steps else when
