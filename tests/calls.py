"""The public calls of a communicator and its worker, read off the classes, so that no new one is missed."""

from __future__ import annotations

import inspect

from offbeat import Communicator
from offbeat.comm.communicator import Worker

CALLS = {name for name, value in vars(Communicator).items() if callable(value) and name[0] != "_"}
OWN = {name for name, value in vars(Worker).items() if callable(value) and name[0] != "_"}
SENDS = {
    name
    for name in CALLS
    if inspect.signature(getattr(Communicator, name)).return_annotation.startswith("Pending")
}
