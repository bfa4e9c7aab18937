"""The named methods: each is one expression over the parts."""

# ruff: noqa: F403, F405
from offbeat.methods.asynchronous import *
from offbeat.methods.averaging import *
from offbeat.methods.moments import *
from offbeat.methods.outer import *
from offbeat.methods.parts import arguments as arguments
from offbeat.methods.sparse import *

__all__ = ["a2sgd", "adacomm", "adaptive", "cocod", "dasgd", "ddp", "def_sgd", "desloc", "diloco"]
__all__ += ["eager_diloco", "eager_sgd", "hierarchical", "local_sgd", "lookahead_diloco", "noloco", "od_sgd"]
__all__ += ["overlap_local_sgd", "palsgd", "post_local_sgd", "qsr", "slowmo", "snoo", "sparse_loco"]
__all__ += ["ssd_sgd", "streaming_diloco", "wagma"]
