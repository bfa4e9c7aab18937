"""All weights of a model at once: given out by rank 0, averaged, or put aside for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from offbeat.base.packed import Packed
from offbeat.base.tensors import local, trainable
from offbeat.comm.communicator import Communicator
from offbeat.engine.extras import floating_buffers


def _all(model: nn.Module) -> list[Tensor]:
    """Trainable parameters and every buffer."""
    return [*map(local, trainable(model).values()), *map(local, model.buffers())]


def _packed(tensors: list[Tensor]) -> Packed:
    packed = Packed.like({str(i): tensor for i, tensor in enumerate(tensors)})
    packed.read(tensors)
    return packed


@torch.no_grad()
def take_from_first(model: nn.Module, comm: Communicator) -> None:
    """Rank 0's weights and buffers, on every rank."""
    tensors = _all(model)
    packed = _packed(tensors)
    comm.broadcast(packed.flats).wait()
    packed.write(tensors)


@torch.no_grad()
def replace_by_mean(model: nn.Module, comm: Communicator, *, but: Collection[str] = ()) -> None:
    """The mean of everyone's weights, except some, and floating buffers, on every rank."""
    weights = [local(p) for name, p in trainable(model).items() if name not in but]
    tensors = [*weights, *floating_buffers(model).values()]
    packed = _packed(tensors)
    comm.mean(packed.flats).wait()
    packed.write(tensors)


@torch.no_grad()
def write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Values into the weights of these names."""
    weights = trainable(model)
    for name, value in values.items():
        local(weights[name]).copy_(value)


@contextmanager
def put_aside(model: nn.Module) -> Iterator[None]:
    """The weights and buffers are what they were, to the bit, on leaving."""
    tensors = _all(model)
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, original in zip(tensors, saved, strict=True):
                tensor.copy_(original)
