"""Matrices compressed to low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.comm.communicator import Communicator
from offbeat.reduce.code import Code, Messages, Vector


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
        rows = tensor.shape[0]
        return self.rank * (rows + tensor.numel() // rows) < tensor.numel()

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        matrices, factors = _matrices(vector, vector.values), state["factors"]
        thin = []
        for span, m in zip(vector.spans, matrices, strict=True):
            q = factors.get(span.name)
            if q is None or not q.any():  # at first, and after a mean of zero
                rng = torch.Generator().manual_seed(whole(self.seed, span.name) % 2**63)
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
