"""A whole gradient in two numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import PRESENT
from offbeat.comm.communicator import Communicator, Pending, arrived
from offbeat.reduce.code import Messages, PayloadSplit
from offbeat.reduce.reducer import Reducer, Staged


@dataclass(frozen=True)
class TwoLevel(Reducer):
    """Each worker keeps its own values, shifted so that their two means are the averages of all workers.

        μ₊ = mean of the values ≥ 0, μ₋ = mean magnitude of the others
        x ← x + (mean(μ₊) − μ₊) where x ≥ 0        x ← x − (mean(μ₋) − μ₋) elsewhere

    Three numbers are sent, whatever the size, and one byte per tensor of gradients. A tensor that no worker
    has does not count; one that only others have counts as zeros. Workers get different results: average
    their parameters from time to time, as `a2sgd` does.

    Yoon et al., "A2SGD", 2020, arXiv 2006.07405.
    """

    lossy, agrees = True, False

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        if comm.size == 1:
            return arrived(payload)
        tensors = dict(zip(payload.names, payload.views, strict=True))
        sizes = torch.tensor([view.numel() for name, view in tensors.items() if not name.startswith("+")])
        note = tensors.get(f"+{PRESENT}")  # which tensors exist here
        here = torch.ones_like(sizes).bool() if note is None else note.cpu() > 0
        most = torch.finfo(torch.float32).max
        split = PayloadSplit(payload, comm, clock, None, takes=lambda tensor: True, most=most, dtype=None)
        code = _shift([vector.values for vector in split.vectors], comm, sizes, here)
        split.sent = [(code, next(code))]
        return Staged([], split.finish, partial(max, split.arrivals))


def _shift(vectors: list[Tensor], comm: Communicator, sizes: Tensor, here: Tensor) -> Messages:
    """Send the sum and number of the values ≥ 0, the mean magnitude of the rest, and which tensors exist."""
    below = sum(int((values < 0).sum()) for values in vectors)
    above = sum(float(values.clamp(min=0).sum(dtype=torch.float64)) for values in vectors)
    under = sum(float(values.clamp(max=0).sum(dtype=torch.float64)) for values in vectors)
    numbers = [above, int(sizes[here].sum()) - below, -under / max(1, below)]
    mine = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
    parts = torch.stack((yield comm.gather(torch.cat([mine, here.to(torch.uint8)]))))
    sums, exist = parts[:, :24].contiguous().view(torch.float64), parts[:, 24:].bool()
    lacking = (sizes * (exist.any(0) & ~exist)).sum(1)  # zeros for tensors that only others have
    levels = torch.stack([sums[:, 0] / (sums[:, 1] + lacking).clamp(min=1), sums[:, 2]], 1)
    up, down = (levels.mean(0) - levels[comm.rank]).tolist()
    for values in vectors:
        values.add_(torch.where(values >= 0, values.new_tensor(up), values.new_tensor(-down)))
