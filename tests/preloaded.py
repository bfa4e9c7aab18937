"""What the workers of tests are forked with, so that none of them spends its time on imports."""

# ruff: noqa: F401
import gc

import conftest
import killable
import table
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import offbeat.names

gc.collect()
gc.freeze()  # otherwise each fork would go through all modules, and copy their memory
