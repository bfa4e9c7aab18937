"""A whole gradient in two numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import PRESENT
from offbeat.comm.communicator import Communicator, Pending, arrived
from offbeat.reduce.code import PayloadSplit
from offbeat.reduce.reducer import Reducer


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
        sizes, here = _find_tensors(payload)
        most = torch.finfo(torch.float32).max
        split = PayloadSplit(payload, comm, clock, lambda tensor: True, most, None, dtype=None)
        vectors = [vector.values for vector in split.vectors]
        mine = torch.cat(
            [_summarize(vectors, int(sizes[here].sum())).view(torch.uint8), here.to(torch.uint8)]
        )

        def arrive(heard: list[Tensor]) -> None:
            levels = _levels(torch.stack(heard), sizes)
            above, below = (levels.mean(0) - levels[comm.rank]).tolist()
            for values in vectors:
                values.add_(torch.where(values >= 0, values.new_tensor(above), values.new_tensor(-below)))

        return split.finish([comm.gather(mine).then(arrive)])


def _find_tensors(payload: Packed) -> tuple[Tensor, Tensor]:
    """The size of each tensor, and whether it exists here (if the payload says)."""
    entries = dict(zip(payload.names, payload.views, strict=True))
    sizes = torch.tensor([view.numel() for name, view in entries.items() if not name.startswith("+")])
    note = entries.get(f"+{PRESENT}")
    return sizes, torch.ones_like(sizes).bool() if note is None else note.cpu() > 0


def _summarize(vectors: list[Tensor], number: int) -> Tensor:
    """The sum and the count of the values ≥ 0 among `number` values, and the mean magnitude of the rest."""
    below = sum(int((values < 0).sum()) for values in vectors)
    above = sum(float(values.clamp(min=0).sum(dtype=torch.float64)) for values in vectors)
    under = sum(float(values.clamp(max=0).sum(dtype=torch.float64)) for values in vectors)
    return torch.tensor([above, number - below, -under / max(1, below)], dtype=torch.float64)


def _levels(heard: Tensor, sizes: Tensor) -> Tensor:
    """The two means of each rank; 0 where there are no values."""
    sums, here = heard[:, :24].contiguous().view(torch.float64), heard[:, 24:].bool()
    lacking = (sizes * (here.any(0) & ~here)).sum(1)  # zeros for tensors that only others have
    return torch.stack([sums[:, 0] / (sums[:, 1] + lacking).clamp(min=1), sums[:, 2]], 1)
