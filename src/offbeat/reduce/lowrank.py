"""Matrices compressed to low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.draws import whole
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Span, Vector
from offbeat.reduce.reducer import Staged


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

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Pending[None]:
        matrices = _matrices(vector, vector.values)
        factors = [
            self._factor(span, m, state["factors"]) for span, m in zip(vector.spans, matrices, strict=True)
        ]
        thin = [m @ q for m, q in zip(matrices, factors, strict=True)]
        first = comm.mean([_join(thin)])
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        second: list[Pending[list[Tensor]]] = []

        def answer() -> None:
            lefts.extend([torch.linalg.qr(p).Q for p in _cut(first.wait()[0], thin)])
            rights.extend([m.t() @ p for m, p in zip(matrices, lefts, strict=True)])
            if vector.residual is not None:
                vector.residual.copy_(vector.values)
                for left, p, q in zip(_matrices(vector, vector.residual), lefts, rights, strict=True):
                    left.addmm_(p, q.t(), alpha=-1)
            second.append(comm.mean([_join(rights)]))

        def arrive() -> None:
            means = _cut(second[0].wait()[0], rights)
            for span, m, p, q in zip(vector.spans, matrices, lefts, means, strict=True):
                torch.mm(p, q.t(), out=m)
                state["factors"][span.name] = q.clone()

        return Staged([answer], arrive, lambda: second[0].arrived())

    def _factor(self, span: Span, matrix: Tensor, factors: dict[str, Tensor]) -> Tensor:
        """The factor of the round before; a random one at first, and after a mean of zero."""
        known = factors.get(span.name)
        if known is not None and bool(known.any()):
            return known
        rng = torch.Generator().manual_seed(whole(self.seed, span.name) % 2**63)
        return torch.randn(matrix.shape[1], self.rank, generator=rng).to(matrix.device)


def _matrices(vector: Vector, flat: Tensor) -> list[Tensor]:
    return [view.flatten(1) for view in vector.views(flat)]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
