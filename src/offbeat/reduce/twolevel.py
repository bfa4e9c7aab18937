"""Two numbers for a whole gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.comm import Communicator, Pending, arrived, sum_in_order
from offbeat.reduce.parcel import Parcel
from offbeat.reduce.reducer import Reducer
from offbeat.schedule import Clock, State
from offbeat.tensors import Packed


@dataclass(frozen=True)
class TwoLevel(Reducer):
    """Each worker keeps its own values, moved so that two of their means are everyone's.

        μ₊ = mean of the values ≥ 0, μ₋ = mean magnitude of the others
        x ← x + (mean(μ₊) − μ₊) where x ≥ 0        x ← x − (mean(μ₋) − μ₋) elsewhere

    Eight bytes travel, whatever the size. Workers do not get the same: average their parameters now and
    then, as `a2sgd` does.

    Yoon et al., "A2SGD", 2020, arXiv 2006.07405.
    """

    @property
    def lossy(self) -> bool:
        return True

    @property
    def agrees(self) -> bool:
        return False

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        if comm.size == 1:
            return arrived(payload)
        parcel = Parcel(payload, comm, clock, lambda tensor: True, torch.finfo(torch.float32).max, None)
        vectors = [vector.values for vector in parcel.vectors]
        number = sum(span.size for vector in parcel.vectors for span in vector.spans)
        mine = _levels(vectors, number)

        def arrive(heard: list[Tensor]) -> None:
            mean = sum_in_order(heard) / comm.size
            above, below = (mean - mine).tolist()
            for values in vectors:
                values.add_(torch.where(values >= 0, above, -below))

        return parcel.landing([comm.gather(mine).then(arrive)])


def _levels(vectors: list[Tensor], number: int) -> Tensor:
    """The mean of the values from zero on, and the mean magnitude of those below; 0 where there are none."""
    below = sum(int((values < 0).sum()) for values in vectors)
    sums = [
        sum(float(side.sum(dtype=torch.float64)) for side in sides)
        for sides in (
            [values.clamp(min=0) for values in vectors],
            [values.clamp(max=0).neg_() for values in vectors],
        )
    ]
    return torch.tensor([sums[0] / max(1, number - below), sums[1] / max(1, below)])
