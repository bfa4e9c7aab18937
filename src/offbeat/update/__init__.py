"""How a mean is applied to the live tensors, with an anchor or without."""

from offbeat.update.update import Anchored, square_distance

__all__ = ["Anchored", "square_distance"]
