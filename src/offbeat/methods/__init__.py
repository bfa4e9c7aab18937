"""The named methods: each is one expression over the parts."""

from offbeat.methods.anchored import *  # noqa: F403
from offbeat.methods.anchored import __all__ as _anchored
from offbeat.methods.averaging import *  # noqa: F403
from offbeat.methods.averaging import __all__ as _averaging
from offbeat.methods.call import arguments as arguments
from offbeat.methods.compressed import *  # noqa: F403
from offbeat.methods.compressed import __all__ as _compressed
from offbeat.methods.delayed import *  # noqa: F403
from offbeat.methods.delayed import __all__ as _delayed
from offbeat.methods.server import *  # noqa: F403
from offbeat.methods.server import __all__ as _server
from offbeat.methods.waitfree import *  # noqa: F403
from offbeat.methods.waitfree import __all__ as _waitfree

__all__ = sorted([*_averaging, *_anchored, *_delayed, *_compressed, *_server, *_waitfree])
