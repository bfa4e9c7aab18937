"""A server sharded over the workers: they push gradients to it and pull weights from it."""

from offbeat.server.pushpull import PushPull
from offbeat.server.rules import GLU, Compensated, LocalRule, LocalStep

__all__ = ["GLU", "Compensated", "LocalRule", "LocalStep", "PushPull"]
