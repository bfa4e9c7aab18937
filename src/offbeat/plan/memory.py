"""Count the copies of the model that a method keeps."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, CodeType, ModuleType

from torch import Tensor, nn

from offbeat.base.packed import Packed
from offbeat.engine.synchronizer import Synchronizer
from offbeat.reduce.code import list_buffers
from offbeat.server.stability import Watch

# The size of a Watch does not depend on the model.
_ELSEWHERE = (type, ModuleType, CodeType, BuiltinFunctionType, nn.Module, Watch)


def copies(sync: Synchronizer) -> float:
    """The tensors that the parts hold, in copies of the model, without model, gradients and optimizer."""
    theirs = [value for o in sync.optimizers for state in o.state.values() for value in state.values()]
    for p in sync.model.parameters():
        theirs += [p, p.grad]
    known = {t.untyped_storage().data_ptr() for t in theirs if isinstance(t, Tensor)}
    held: dict[int, int] = {}
    for tensor in _reach(list(sync.parts), set(map(id, sync.optimizers))):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values()) / sum(p.numel() * p.element_size() for p in sync.model.parameters())


def _reach(things: list[object], seen: set[int]) -> list[Tensor]:
    """All tensors that can be reached from these objects."""
    found = []
    while things:
        thing = things.pop()
        if id(thing) in seen or isinstance(thing, _ELSEWHERE):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.append(thing)
            continue
        if isinstance(thing, Packed):
            found += list_buffers(thing)
        for child in gc.get_referents(thing):
            # A function's globals would lead to everything.
            if not (isinstance(child, dict) and "__builtins__" in child):
                things.append(child)
    return found
