"""What is sent: each code owns its collective."""

from offbeat.reduce.mean import Mean
from offbeat.reduce.reducer import Reducer

__all__ = ["Mean", "Reducer"]
