"""Codes that send a summary: a matrix as a product of two thin ones, a gradient as two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.draws import draw_whole
from offbeat.base.packed import Packed
from offbeat.base.tensors import PRESENT
from offbeat.comm.communicator import Communicator, Pending, arrived
from offbeat.reduce.code import Code, Messages, PayloadSplit, Reducer
from offbeat.reduce.vectors import Vector


@dataclass(frozen=True, repr=False)
class LowRank(Code):
    """Each matrix as a product of two thin ones: each round is one step of a power iteration.

        P = orthogonal(mean(M_k Q))        Q = mean(M_kᵀ P)        mean(M_k) ≈ P Qᵀ

    A tensor of more dimensions is flattened to a matrix with its first dimension as rows. Vectors, and
    matrices that two thin ones would not make smaller, are sent as they are. Larger `rank` loses less and
    sends more. Use it with `ErrorFeedback`.

        offbeat.ddp(model, optimizer, reduce=ErrorFeedback(LowRank(4)))

    Vogels et al., "PowerSGD", NeurIPS 2019, arXiv 1905.13727.
    """

    rank: int
    seed: int = 0

    messages = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.rank, 1):
            raise ValueError(f"{self!r}: rank must be at least 1.")

    def init(self) -> State:
        return {"factors": {}}

    def takes(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or not super().takes(tensor):
            return False
        return self.rank * (len(tensor) + tensor[0].numel()) < tensor.numel()

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        matrices, factors = _matrices(vector, vector.values), state["factors"]
        thin = []
        for span, m in zip(vector.spans, matrices, strict=True):
            q = factors.get(span.name)
            if q is None or not q.any():  # at first, and after a mean of zero
                rng = torch.Generator().manual_seed(draw_whole(self.seed, span.name) % 2**63)
                q = torch.randn(m.shape[1], self.rank, generator=rng).to(m.device)
            thin.append(m @ q)
        (mean,) = yield comm.mean([torch.cat([p.flatten() for p in thin])])
        lefts = [torch.linalg.qr(p).Q for p in _cut(mean, thin)]
        rights = [m.t() @ p for m, p in zip(matrices, lefts, strict=True)]
        if vector.residual is not None:
            vector.residual.copy_(vector.values)
            for left, p, q in zip(_matrices(vector, vector.residual), lefts, rights, strict=True):
                left.addmm_(p, q.t(), alpha=-1)
        (mean,) = yield comm.mean([torch.cat([q.flatten() for q in rights])])
        for span, m, p, q in zip(vector.spans, matrices, lefts, _cut(mean, rights), strict=True):
            torch.mm(p, q.t(), out=m)
            factors[span.name] = q.clone()


def _matrices(vector: Vector, flat: Tensor) -> list[Tensor]:
    return [flat[span.start : span.end].view(span.shape).flatten(1) for span in vector.spans]


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@dataclass(frozen=True)
class TwoLevel(Reducer):
    """Each worker keeps its own values, shifted so that their two means are the averages of all workers.

        μ₊ = mean of the values ≥ 0, μ₋ = mean magnitude of the others
        x ← x + (mean(μ₊) − μ₊) where x ≥ 0        x ← x − (mean(μ₋) − μ₋) elsewhere

    Three numbers are sent, whatever the size, and one byte per tensor of gradients. A tensor that no worker
    has does not count; one that only other workers have counts as zeros. Workers get different results:
    average their parameters from time to time, as `a2sgd` does.

    Yoon et al., "A2SGD", 2020, arXiv 2006.07405.
    """

    lossy, agrees, splits = True, False, False

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        if comm.size == 1:
            return arrived(payload)
        tensors = dict(zip(payload.names, payload.views, strict=True))
        sizes = torch.tensor([view.numel() for name, view in tensors.items() if not name.startswith("+")])
        note = tensors.get(f"+{PRESENT}")  # which tensors exist here
        here = torch.ones_like(sizes).bool() if note is None else note.cpu() > 0
        split = PayloadSplit(payload, comm, clock, None)
        return split.send([_shift([vector.values for vector in split.vectors], comm, sizes, here)])


def _shift(vectors: list[Tensor], comm: Communicator, sizes: Tensor, here: Tensor) -> Messages:
    """Shift the values by what the ranks send: sum and number of those ≥ 0, mean of the rest, `here`."""
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
