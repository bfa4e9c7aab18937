"""The smallest full loop: a linear regression whose workers average their weights every 8 steps.

torchrun --standalone --nproc-per-node 2 examples/minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn

import offbeat  # 1

torch.set_num_threads(1)
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")  # 2; without it, a world of one
rank = dist.get_rank() if dist.is_initialized() else 0

truth = torch.arange(1.0, 6.0)
draw = torch.Generator().manual_seed(rank)  # every worker has its own data

torch.manual_seed(rank)  # every worker may start as it likes: rank 0's weights are given to all
model = nn.Linear(5, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sync = offbeat.local_sgd(model, optimizer, every=8)  # 3
for _ in range(200):
    x = torch.randn(16, 5, generator=draw)
    y = x @ truth + 0.1 * torch.randn(16, generator=draw)
    nn.functional.mse_loss(model(x).squeeze(1), y).backward()
    sync.step()  # 4, where optimizer.step() stood
    optimizer.zero_grad()
sync.finish()  # 5: now all workers have the same weights

if rank == 0:
    print("weights", [round(w, 2) for w in model.weight[0].tolist()], "of", truth.tolist())
    print(sync, "cost", sync.totals)
if dist.is_initialized():
    dist.destroy_process_group()
