"""The named methods: each is one expression over the parts."""

from offbeat.methods.asynchronous import *  # noqa: F403
from offbeat.methods.asynchronous import __all__ as _asynchronous
from offbeat.methods.averaging import *  # noqa: F403
from offbeat.methods.averaging import __all__ as _averaging
from offbeat.methods.call import arguments as arguments
from offbeat.methods.messages import *  # noqa: F403
from offbeat.methods.messages import __all__ as _messages
from offbeat.methods.outer import *  # noqa: F403
from offbeat.methods.outer import __all__ as _outer

__all__ = sorted([*_asynchronous, *_averaging, *_messages, *_outer])
