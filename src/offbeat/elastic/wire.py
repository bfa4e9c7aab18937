"""A state on its way to another worker: flat tensors, and a description that is checked. Never a pickle."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from offbeat.base.clock import State
from offbeat.base.errors import OffbeatError
from offbeat.comm.communicator import Communicator

_KINDS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _KINDS}
_CPU = torch.device("cpu")
_MOST = 2**26  # bytes of a description
_PIECE = 2**22  # bytes of one message


class Unreadable(OffbeatError):
    """The state that was offered cannot be read by this worker, now or later."""


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """Return the value as JSON, with its tensors appended to the list."""
    if torch.is_tensor(value):
        tensors.append(value.detach())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]}
    if isinstance(value, dict):
        return {"dict": [[describe(key, tensors), describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [describe(item, tensors) for item in value]}
    if isinstance(value, list):
        return [describe(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A state holds a {type(value).__name__}, which cannot be sent to a worker that joins.")


def rebuild(text: Any, tensors: list[Tensor], most: int, place: torch.device = _CPU) -> Any:
    """Return the value again, and append its tensors, still empty, of at most so many bytes, to the list.

    Tensors that were on a device of another worker are made on `place`, the device of this one's model.
    """
    if isinstance(text, list):
        return [rebuild(item, tensors, most, place) for item in text]
    if not isinstance(text, dict):
        return text
    ((kind, inside),) = text.items()
    if kind == "dict":
        pairs = ([rebuild(part, tensors, most, place) for part in pair] for pair in inside)
        return {key: item for key, item in pairs}  # noqa: C416  # dict() would take any sequence
    if kind == "tuple":
        return tuple(rebuild(item, tensors, most, place) for item in inside)
    dtype, shape, device = inside
    if kind != "tensor" or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(kind)
    if device not in ("cpu", place.type):
        raise ValueError(f"it has a tensor on {device}, the model of this worker is on {place.type}")
    if math.prod(shape) * _DTYPES[dtype].itemsize > most - sum(tensor.nbytes for tensor in tensors):
        raise ValueError(shape)
    # With its index: this is not the thread in which the caller has chosen a device.
    where = _CPU if device == "cpu" else place
    tensors.append(torch.empty(shape, dtype=_DTYPES[dtype], device=where))
    return tensors[-1]


def share_text(text: str, comm: Communicator) -> str:
    """Return the text of rank 0, on all ranks."""
    own = text.encode()
    length = comm.tell([len(own)]).wait()[0][0]
    room = torch.zeros(length, dtype=torch.uint8)
    if comm.rank == 0:
        room.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    comm.broadcast([room]).wait()
    return bytes(room.tolist()).decode()


def send_state(state: State, pair: Communicator) -> int:
    """Send a state to the other worker of a pair. Return how many bytes it had."""
    tensors: list[Tensor] = []
    text = json.dumps(describe(state, tensors)).encode()
    size = sum(tensor.nbytes for tensor in tensors)
    pair.tell([len(text), size]).wait()
    _pass(torch.frombuffer(bytearray(text), dtype=torch.uint8), pair)
    for tensor in tensors:
        flat = tensor.cpu().contiguous().view(-1)
        _pass(flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8), pair)
    pair.tell([]).wait()  # a worker that goes on at once would not notice that the other has none of it
    return len(text) + size


def receive_state(pair: Communicator, most: int, place: torch.device = _CPU) -> tuple[State, int]:
    """Receive the state of the other worker of a pair, whose tensors have at most `most` bytes.

    Return it and how many bytes it had. `place` is the device of this worker's model.
    """
    length, size = next(words[:2] for rank, words in enumerate(pair.tell([]).wait()) if rank != pair.rank)
    if not 0 < length <= _MOST or not 0 <= size <= most:
        raise Unreadable(f"The state that was offered has {size:,} bytes, which this model cannot have.")
    text = torch.zeros(length, dtype=torch.uint8)
    _pass(text, pair)
    tensors: list[Tensor] = []
    try:
        state: State = rebuild(json.loads(bytes(text.tolist())), tensors, size, place)
        sizes = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)
        if not isinstance(state, dict) or sizes != size:
            raise ValueError(size)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Unreadable(f"This worker cannot read the state of the run: {error!r}.") from error
    for tensor in tensors:
        flat = tensor.view(-1)
        narrow = torch.uint8 if flat.dtype == torch.bool else flat.dtype
        room = torch.empty(len(flat), dtype=narrow)
        _pass(room.view(torch.uint8), pair)
        flat.copy_(room)
    pair.tell([]).wait()
    return state, length + size


def _pass(flat: Tensor, pair: Communicator) -> None:
    """Move the bytes of the pair's first worker into the tensor of the second, a piece at a time."""
    for piece in torch.split(flat, _PIECE) if len(flat) else ():
        pair.broadcast([piece]).wait()
