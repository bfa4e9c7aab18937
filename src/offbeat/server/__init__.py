"""A server sharded over the workers: gradients are pushed to it, weights pulled from it."""

from offbeat.server.pushpull import PushPull
from offbeat.server.rules import GLU, Compensated, LocalRule, LocalStep

__all__ = ["GLU", "Compensated", "LocalRule", "LocalStep", "PushPull"]
