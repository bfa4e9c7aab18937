"""The named methods: each is one expression over the parts."""

# ruff: noqa: F403, F405
from offbeat.methods.asynchronous import *
from offbeat.methods.averaging import *
from offbeat.methods.coded import *
from offbeat.methods.moments import *
from offbeat.methods.outer import *
from offbeat.methods.parts import arguments as arguments
from offbeat.methods.sparse import *

__all__ = ["a2sgd", "adacomm", "adaptive", "cocod", "dasgd", "ddp", "def_sgd", "desloc", "diloco"]
__all__ += ["eager_diloco", "eager_sgd", "gradient_code", "hierarchical", "local_sgd", "lookahead_diloco"]
__all__ += ["noloco", "od_sgd", "overlap_local_sgd", "palsgd", "post_local_sgd", "qsr", "slowmo", "snoo"]
__all__ += ["sparse_loco", "ssd_sgd", "streaming_diloco", "wagma"]
