"""The memory in which a worker passes coded gradients to its sidecar, and gets decoded ones back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.comm.background import Sidecar
from offbeat.waitfree.clusters import Clusters
from offbeat.waitfree.rounds import Handover, sync_device


class Verdict(NamedTuple):
    """Which ranks had answered when a round was decided, and which were late: much later than the others."""

    answered: frozenset[int]
    late: frozenset[int]


class Decoded(NamedTuple):
    """The result of a round: the mean of all parts, the verdict, and the clusters of the next round."""

    mean: Packed
    verdict: Verdict
    clusters: Clusters


class Answers(Handover):
    """One answer at a time for the sidecar, and the results of all rounds for the worker, in order.

    Results are kept for a worker that is late, at most `behind` of them. Then its sidecar waits, and with it
    all other workers. The last of the tensors says which of the others exist.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        sidecar: Sidecar,
        clusters: Clusters,
        *,
        dynamic: bool,
        behind: int,
    ) -> None:
        self.device = next(iter(tensors.values())).device
        self.version, self.clusters = version, clusters  # those of the round under way
        self._sidecar, self._dynamic, self._behind = sidecar, dynamic, behind
        self._answer: list[Tensor] = []
        self._verdict = Verdict(frozenset(), frozenset())
        self._model, self._free = Packed.like(tensors), list[Packed]()
        self._free.append(self._model)
        self.results: deque[Decoded] = deque()

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker. No copy is needed: it waits for the round that uses this answer."""
        self._answer = list(tensors)
        for device in {tensor.device for tensor in tensors}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()

    def decide(self, verdict: Verdict) -> None:
        """In the sidecar: the round under way uses the answers of these ranks."""
        self._verdict = verdict

    def take(self) -> tuple[Packed, int]:
        with self._sidecar.locked():
            late = f"its worker, which is {self._behind} rounds behind"
            self._sidecar.until(lambda: len(self.results) < self._behind, late)
            packed = self._free.pop() if self._free else None
        if packed is None:
            packed = self._model.over([torch.empty_like(flat) for flat in self._model.flats])
        factor = self.clusters.weigh(self._verdict.answered).get(self._sidecar.comm.rank, 0.0)
        if factor:
            packed.read(self._answer)
        packed.scale(factor)
        if factor:
            packed.views[-1].copy_(self._answer[-1])  # not scaled: factors of both signs could cancel it
        sync_device(packed)
        return packed, self.version

    def bring(self, mean: Packed) -> None:
        clusters, verdict = self.clusters, self._verdict
        self.clusters = clusters.reform(verdict.late) if self._dynamic else clusters
        self.results.append(Decoded(mean, verdict, self.clusters))

    def land(self, result: Decoded, tensors: Sequence[Tensor]) -> None:
        """In the worker: copy a result into these tensors. Its memory is reused."""
        result.mean.write(tensors)
        sync_device(result.mean)
        with self._sidecar.locked():
            self._free.append(result.mean)
