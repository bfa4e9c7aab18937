"""Operations on all weights of a model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.base.packed import Packed
from offbeat.base.tensors import local, trainable
from offbeat.comm.communicator import Communicator, Pending
from offbeat.engine.extras import Buffers

_PIECE = 2**15  # values per pass of a checksum: few enough to stay in the cache
_MIX, _NEXT = -7046029254386353131, 6364136223846793005  # odd, so that multiplying by them loses no bit
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take_from_first(model: nn.Module, comm: Communicator) -> None:
    """Copy rank 0's weights and buffers to every rank."""
    _exchange(_list_all(model), comm.broadcast)


def replace_by_mean(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Average the tensors among all workers, in one message."""
    _exchange(tensors, comm.mean)


@torch.no_grad()
def _exchange(tensors: Sequence[Tensor], collective: Callable[[list[Tensor]], Pending[Any]]) -> None:
    packed = Packed.like({str(i): tensor for i, tensor in enumerate(tensors)})
    packed.read(tensors)
    collective(packed.flats).wait()
    packed.write(tensors)


def average_where_different(model: nn.Module, comm: Communicator) -> None:
    """Average the weights if workers differ in them, and the floating buffers. Equal ones keep every bit."""
    # A mean of three would not guarantee that: x + x + x times 1/3 is not x.
    kinds = [list(map(local, trainable(model).values())), list(Buffers(model, "average").averaged().values())]
    answers = comm.tell([checksum(tensors) for tensors in kinds]).wait()
    different = [tensors for i, tensors in enumerate(kinds) if len({words[i] for words in answers}) > 1]
    if different:
        replace_by_mean([tensor for tensors in different for tensor in tensors], comm)


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> int:
    """Return 64 bits that depend on every bit of the tensors and on its position, not on the device."""
    factors: dict[torch.device, Tensor] = {}  # one odd, irregular factor per position
    flats = [local(tensor).contiguous().view(-1) for tensor in tensors]
    longest, total = min(_PIECE, max((flat.numel() for flat in flats), default=0)), 0
    for flat in flats:
        if flat.device not in factors:
            mixed = torch.arange(longest, device=flat.device).mul_(_MIX)
            factors[flat.device] = mixed.bitwise_xor_(mixed >> 29).mul_(_NEXT).bitwise_or_(1)
        pieces = torch.split(flat.view(_INTEGERS[flat.element_size()]), _PIECE)
        sums = [(piece * factors[flat.device][: piece.numel()]).sum() for piece in pieces]
        for own in torch.stack(sums).tolist():
            total = (total * _NEXT + own) % 2**64
    return total - 2**64 if total >= 2**63 else total


@torch.no_grad()
def write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into the weights of these names."""
    weights = trainable(model)
    for name, value in values.items():
        local(weights[name]).copy_(value)


@contextmanager
def preserve(model: nn.Module) -> Iterator[None]:
    """Put the weights and buffers back on leaving, to the bit."""
    tensors = _list_all(model)
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, original in zip(tensors, saved, strict=True):
                tensor.copy_(original)


def _list_all(model: nn.Module) -> list[Tensor]:
    """Return the trainable parameters and every buffer."""
    return [*map(local, trainable(model).values()), *map(local, model.buffers())]
