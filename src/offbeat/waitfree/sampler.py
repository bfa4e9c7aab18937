"""Hands out the parts of the data that a worker computes in each step of gradient coding."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from offbeat.base.checks import is_whole
from offbeat.base.clock import State
from offbeat.base.draws import draw_order, draw_whole
from offbeat.engine.synchronizer import Synchronizer
from offbeat.waitfree.coded import CodedGradients


@dataclass(frozen=True)
class DataPart:
    """One part of a step's samples. Scale the mean loss over them by `weight`."""

    number: int
    indices: tuple[int, ...]
    weight: float
    seed: int
    _dataset: Any = field(repr=False)
    _collate: Callable[[list[Any]], Any] = field(repr=False)

    def load(self) -> Any:
        """Read the samples as one batch."""
        return self._collate([self._dataset[index] for index in self.indices])


def coded_sampler(
    dataset: Any,
    sync: Synchronizer,
    *,
    batch_size: int,
    epochs: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> CodedSampler:
    """Return the steps of a run with `gradient_code`, each with the parts that this worker computes.

    A step has as many parts as there are workers, of `batch_size` samples each. The last step of an epoch has
    what is left. While a part is in use, random numbers come from its own seed, the same on all workers that
    compute it; afterwards the previous generators continue. If a step was decided without this worker, it has
    no more parts. Every worker reads the whole `dataset`, by index.

        for parts in offbeat.coded_sampler(dataset, sync, batch_size=32, epochs=10):
            for part in parts:
                x, y = part.load()
                (part.weight * loss(model(x), y)).backward()
            sync.step()
            optimizer.zero_grad()
    """
    parts = sync.parts if isinstance(sync, Synchronizer) else ()
    coded = [part for part in parts if isinstance(part, CodedGradients)]
    if not coded:
        raise ValueError(f"coded_sampler(dataset, {sync!r}): the method must be gradient_code(...).")
    for name, value in (("batch_size", batch_size), ("epochs", epochs)):
        if not is_whole(value, 1):
            raise ValueError(f"coded_sampler({name}={value!r}): {name} must be a whole number, at least 1.")
    if not is_whole(seed):
        raise ValueError(f"coded_sampler(seed={seed!r}): seed must be a whole number.")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise TypeError(
            f"coded_sampler(dataset): a {kind} has no length and index: pass a dataset, not a loader."
        )
    if not len(dataset):
        raise ValueError("coded_sampler(dataset): the dataset is empty.")
    return CodedSampler(dataset, sync, coded[0], batch_size, epochs, shuffle, seed, collate)


@dataclass(eq=False)
class CodedSampler:
    """See `coded_sampler`. Its place is in `state_dict`, for `sync.save(folder, sampler=sampler)`."""

    dataset: Any
    sync: Synchronizer
    coded: CodedGradients
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    collate: Callable[[list[Any]], Any]
    step: int = 0  # the number of steps handed out

    def __len__(self) -> int:
        return self.epochs * self._steps()

    def _steps(self) -> int:
        """Return the steps of an epoch."""
        return -(-len(self.dataset) // (self.batch_size * self._size))

    @property
    def _size(self) -> int:
        """The number of workers, and of parts."""
        return self.coded.peers.everyone.size

    def __iter__(self) -> Iterator[Iterator[DataPart]]:
        self.sync.start()  # gradients of different weights could not be added
        if self.coded.active:
            self.coded.open(self.sync.steps)  # now, so that not even the first step waits for late workers
        while self.step < len(self):
            self.step += 1
            self.coded.unfinished = self.coded.load
            yield self._hand_out(self.step - 1)

    def _hand_out(self, step: int) -> Iterator[DataPart]:
        for number, coefficient in self.coded.hand_out(self.sync.steps):
            part = self.part(step, number, coefficient)
            if part.indices:
                with seeded(part.seed, self.coded.model):
                    yield part

    def part(self, step: int, number: int, coefficient: float) -> DataPart:
        """One part of a step: every K-th of its samples."""
        size, samples, (epoch, place) = self._size, len(self.dataset), divmod(step, self._steps())
        order: Sequence[int] = range(samples)
        if self.shuffle:
            order = draw_order(samples, self.seed, epoch, "order")
        chosen = order[place * size * self.batch_size : (place + 1) * size * self.batch_size]
        own = tuple(chosen[number::size])
        weight = coefficient * len(own) * size / len(chosen)
        seed = draw_whole(self.seed, step, number, "part") >> 1
        return DataPart(number, own, weight, seed, self.dataset, self.collate)

    def state_dict(self) -> State:
        return {"step": self.step}

    def load_state_dict(self, state: State) -> None:
        self.step = state["step"]


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """Inside, random numbers of torch, Python and NumPy come from this seed. The old ones continue after.

    Accelerators are included if they hold the model.
    """
    numpy = sys.modules.get("numpy")
    places = {p.device for p in model.parameters() if p.device.type != "cpu"}
    kind = next((place.type for place in places), "cuda")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng([place.index for place in places], device_type=kind):
        torch.default_generator.manual_seed(seed)
        for place in places:
            module = torch.get_device_module(place)
            with module.device(place.index):
                module.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)
