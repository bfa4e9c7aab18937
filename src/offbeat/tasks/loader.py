"""Endless batches from a DataLoader, with an order that depends only on seed, rank and pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader


class LoaderBatches(Iterator[Any]):
    """One worker's endless batches, from a loader of its own part of the data.

    Each pass seeds the loader's generator, or torch's own for the time that it takes to draw the order, with
    (seed, rank, pass). A sampler with `set_epoch` gets the number of the pass. A checkpoint holds the pass
    and the number of batches taken. To resume, as many batches are read again and dropped.

        LoaderBatches(DataLoader(part, batch_size=32, shuffle=True), rank=0, seed=0)
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int, seed: int) -> None:
        self.loader, self.rank, self.seed = loader, rank, seed
        self.passed, self.taken = 0, 0
        self._pass: Iterator[Any] | None = None

    def __next__(self) -> tuple[Tensor, Tensor]:
        batch = None if self._pass is None else next(self._pass, None)
        if batch is None:
            self.passed, self.taken = self.passed + 1, 0
            batch = self._begin()
        self.taken += 1
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            kind = type(batch).__name__
            raise TypeError(
                f"The DataLoader of rank {self.rank} gives a {kind}: a batch must be (inputs, targets)."
            )
        return batch[0], batch[1]

    def _begin(self) -> Any:
        """Start a pass and return its first batch. The order is drawn with it."""
        digest = hashlib.blake2b(f"{self.seed}/{self.rank}/{self.passed}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big") % 2**63
        if self.loader.generator is not None:
            self.loader.generator.manual_seed(number)
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(self.passed)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        try:
            self._pass = iter(self.loader)
            batch = next(self._pass, None)
        finally:
            torch.set_rng_state(state)
        if batch is None:
            reason = "use fewer workers, a smaller --batch, or drop_last=False."
            raise ValueError(f"The DataLoader of rank {self.rank} gives no batch: {reason}")
        return batch

    def state_dict(self) -> dict[str, int]:
        """The pass, and how many of its batches were taken."""
        return {"passed": self.passed, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch that was next when `state` was taken."""
        self.passed, self.taken, self._pass = state["passed"], state["taken"], None
        if self.taken:
            self._begin()
            assert self._pass is not None
            for _ in range(self.taken - 1):
                next(self._pass, None)  # with more workers than before, a pass is shorter
