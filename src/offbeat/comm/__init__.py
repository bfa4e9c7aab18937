"""How workers talk: the communicator's contract, torch's process groups, and wrappers around them."""

from offbeat.comm.communicator import Communicator, Solo, sum_in_order
from offbeat.comm.pending import Pending

__all__ = ["Communicator", "Pending", "Solo", "sum_in_order"]
