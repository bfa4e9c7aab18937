"""Eight workers in one process, in virtual time: who waits how long, with and without a delay?

    python examples/simulate.py

A gradient takes 50 ms. Rank 3 is a straggler and always needs a fifth more; every worker stumbles for 200 ms
once in 24 steps, each at another time. The network has 20 ms of latency and 100 Mbit/s. A delay of 4 steps
hides the network and the stumbling. It cannot hide the straggler: a faster worker waits for it in the end.
"""

import torch
from torch import nn

import offbeat

torch.set_num_threads(1)


def compute(rank: int, step: int) -> float:
    """Virtual seconds a worker needs for one gradient."""
    usual = 0.06 if rank == 3 else 0.05
    return usual + (0.2 if step % 24 == 3 * rank else 0.0)


def trained_by(expression: str) -> list[tuple[float, float, float]]:
    """Seconds waited, seconds in all and the last loss of each worker."""

    def worker(comm: offbeat.Communicator) -> tuple[float, float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(comm.rank)
        with offbeat.method(expression)(model, optimizer, group=comm) as sync:
            for _ in range(240):
                x = torch.randn(8, 32, generator=draw)
                loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
                loss.backward()
                sync.step()
                optimizer.zero_grad()
        return sync.totals.seconds_waited, comm.now(), loss.item()

    network = offbeat.Network(latency=0.02, bandwidth=12.5e6)
    return offbeat.simulate(worker, workers=8, network=network, compute=compute)


methods = ["ddp()", "local_sgd(every=8)", "local_sgd(every=8, delay=4)"]
columns = [trained_by(expression) for expression in methods]
print(f"{'seconds waited':16}" + "".join(f"{expression:>30}" for expression in methods))
for rank, row in enumerate(zip(*columns, strict=True)):
    print(f"{f'rank {rank}':16}" + "".join(f"{waited:30.2f}" for waited, _, _ in row))
for name, place in (("seconds in all", 1), ("last loss", 2)):
    print(f"{name:16}" + "".join(f"{max(worker[place] for worker in column):30.2f}" for column in columns))
