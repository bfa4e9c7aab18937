"""How workers communicate: the contract, the table of collectives, backends, and wrappers."""

from offbeat.comm.collective import sum_in_order
from offbeat.comm.communicator import Communicator, Pending
from offbeat.comm.solo import Solo

__all__ = ["Communicator", "Pending", "Solo", "sum_in_order"]
