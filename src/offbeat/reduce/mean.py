"""The plain mean, in full or in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Messages, Vector
from offbeat.reduce.quantized import CastCodec, mean_in_two_phases

_PIECE = 2**24  # values; on loopback gloo moves one long vector faster than many short ones
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, repr=False)
class Mean(Code):
    """The exact mean in float32, or in float64 for float64 tensors.

    With `dtype` "bfloat16" or "float16" half the bytes travel; sums are still float32.

        offbeat.diloco(model, optimizer, reduce=Mean("bfloat16"))
    """

    dtype: str | torch.dtype | None = None

    messages = 2  # in half precision

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.dtype if self.dtype is None else str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", name)
        if name is not None and name not in _NARROW:
            raise ValueError(
                f'{self!r}: dtype must be "bfloat16", "float16", or left out for full precision.'
            )
        object.__setattr__(self, "lossy", name is not None)
        if name is not None:
            object.__setattr__(self, "most", torch.finfo(_NARROW[name]).max)

    def __repr__(self) -> str:
        return super().__repr__() if self.dtype else "Mean()"

    def start(
        self,
        payload: Packed,
        comm: Communicator,
        clock: Clock,
        state: State,
        residual: Sequence[Tensor] | None = None,
    ) -> Pending[Packed]:
        if self.dtype is not None:
            return super().start(payload, comm, clock, state, residual)
        for flat in residual or ():
            flat.zero_()
        return send(payload, comm)

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        return mean_in_two_phases(vector, comm, CastCodec(_NARROW[str(self.dtype)]))


def send(payload: Packed, comm: Communicator, live: Sequence[Tensor] = ()) -> Pending[Packed]:
    """Send a payload; its exact mean arrives. `live` are packed first, as its first entries.

    A large payload goes in pieces: one is packed while others travel.
    """
    flats = payload.flats
    if sum(map(torch.numel, flats)) < _PIECE:
        if live:
            payload.cut(len(live))[0].read(live)
        return comm.total(flats).then(lambda _: payload.scaled(1 / comm.size))
    packed, messages = payload.cut(len(live))[0].is_memory_of(live), []
    for piece, inside in payload.pieces(_PIECE):
        own = [i for i in inside if i < len(live) and not packed]
        if own:
            torch._foreach_copy_([payload.views[i] for i in own], [live[i] for i in own])
        messages.append(comm.total([piece]))

    def wait() -> Packed:
        for message in messages:
            message.wait()
        return payload.scaled(1 / comm.size)

    return Pending(
        wait,
        lambda: all(message.done() for message in messages),
        lambda: max(message.arrived() for message in messages),
    )
