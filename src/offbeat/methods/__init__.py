"""The named methods: each is one expression over the parts."""

# ruff: noqa: F403, F405
from offbeat.methods.asynchronous import *
from offbeat.methods.averaging import *
from offbeat.methods.coded import *
from offbeat.methods.minimax import *
from offbeat.methods.moments import *
from offbeat.methods.outer import *
from offbeat.methods.parts import arguments as arguments
from offbeat.methods.sparse import *

__all__ = ["a2sgd", "adacomm", "adaptive", "cocod", "coda", "dasgd", "ddp", "def_sgd", "desloc"]
__all__ += ["diloco", "eager_diloco", "eager_sgd", "gradient_code", "hierarchical", "local_sgd"]
__all__ += ["lookahead_diloco", "noloco", "od_sgd", "overlap_local_sgd", "palsgd", "post_local_sgd"]
__all__ += ["qsr", "slowmo", "snoo", "sparse_loco", "ssd_sgd", "streaming_diloco", "wagma"]
