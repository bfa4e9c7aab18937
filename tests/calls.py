"""What a communicator can be asked for, read off the class: nobody has to remember to add a new call."""

from __future__ import annotations

import inspect

from offbeat import Communicator

CALLS = {name for name, value in vars(Communicator).items() if callable(value) and name[0] != "_"}
SENDS = {
    name
    for name in CALLS
    if inspect.signature(getattr(Communicator, name)).return_annotation.startswith("Pending")
}
