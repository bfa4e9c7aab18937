"""The live tensors of a model, which exchanges read and write in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_WRAPPERS = ("_orig_mod", "module")
PRESENT = "present"  # the note that says which gradients exist

Share = tuple[dict[str, Tensor], list[Tensor]]  # what a worker sends in a round: notes and tensors


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. Imported only if needed, because that takes a second."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a tensor, detached and real-valued. It shares the tensor's memory."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor and is_sharded(tensor):
        tensor = tensor.to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def read_version(tensor: Tensor | None) -> tuple[object, ...]:
    """Return a value that changes when the tensor is changed in place.

    `torch._foreach_mul_` and FSDP2 change a DTensor without a new version, so its norm is compared too.
    """
    if tensor is None or not is_sharded(tensor):
        return () if tensor is None else (tensor._version,)
    own = local(tensor)
    norm = torch.linalg.vector_norm(own, dtype=torch.promote_types(own.dtype, torch.float32))
    return tensor._version, norm.nan_to_num_(nan=-1.0)  # NaN would differ from itself


def clean_names(items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by name, without the prefixes that `torch.compile` and wrappers add."""
    items = list(items)
    clean = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name, _ in items]
    if len(set(clean)) < len(items):  # the model itself has a submodule called "module"
        clean = [name for name, _ in items]
    return {name: tensor for name, (_, tensor) in zip(clean, items, strict=True)}


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return every trainable parameter by name. Tied ones appear once."""
    return {name: p for name, p in clean_names(model.named_parameters()).items() if p.requires_grad}


class Live:
    """The tensors of an exchange: `params(model)`, `grads(model)` or `moments(model, ...)`."""

    early = False  # whether the exchange acts before the local step
    _call = "params"

    def __init__(self, model: nn.Module, only: Sequence[str] | None = None) -> None:
        chosen = trainable(model)
        if only is not None:
            if unknown := [name for name in only if name not in chosen]:
                raise ValueError(f"{self._call}(model, only=...): the model has no trainable {unknown[0]!r}.")
            chosen = {name: p for name, p in chosen.items() if name in set(only)}
        self.model, self.only = model, None if only is None else tuple(only)
        self.names, self.parameters = tuple(chosen), list(chosen.values())

    def __repr__(self) -> str:
        return f"{self._call}({len(self.names)} tensors)"

    def owners(self) -> dict[str, Tensor]:
        """Return the parameters whose optimizer moments are exchanged, by name."""
        return dict(zip(self.names, self.parameters, strict=True))

    def tensors(self) -> list[Tensor]:
        """Return the tensors themselves, to be written in place."""
        return [local(p) for p in self.parameters]

    def like(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes, by name."""
        return {name: local(p) for name, p in zip(self.names, self.parameters, strict=True)}

    def notes(self) -> dict[str, Tensor]:
        """Return small tensors to be sent in the same round. Call this before `tensors`."""
        return {}

    def land_notes(self, notes: Sequence[Tensor], *, late: bool = False) -> None:
        """Use the mean of all notes, after the tensors are written. `late`: these may be of another round."""


class Gradients(Live):
    """Gradients, averaged before the local step, in the order in which a backward pass completes them.

    A gradient that is None counts as zero. In a step in which no mean lands, a worker uses its `own`, or 0.
    """

    early = True
    _call = "grads"

    def __init__(self, model: nn.Module, *, own: bool = True) -> None:
        super().__init__(model)
        self.names, self.parameters, self.own = self.names[::-1], self.parameters[::-1], own

    def tensors(self) -> list[Tensor]:
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.layout != torch.strided:
                raise TypeError(f"The gradient of {name!r} is sparse: build its layer with sparse=False.")
        return [local(p.grad) for p in self.parameters if p.grad is not None]

    def notes(self) -> dict[str, Tensor]:
        """Return 1 for each gradient that exists here. The mean shows which exist on any worker."""
        return {PRESENT: torch.tensor([float(p.grad is not None) for p in self.parameters])}

    def take(self, *, copy: bool) -> Share:
        """Return this step's gradients, with zeros for missing ones. `copy` them if `.grad` will change."""
        notes, missing = self.notes(), [p for p in self.parameters if p.grad is None]
        own = [tensor.clone() if copy else tensor for tensor in self.tensors()]
        for p in missing:
            p.grad = None
        return notes, own

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, no parameter has a gradient. The gradients return at the end."""
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in zip(self.parameters, before, strict=True):
                p.grad = grad

    def land_notes(self, notes: Sequence[Tensor], *, late: bool = False) -> None:
        """Remove gradients that no worker has, so that the optimizer skips those parameters."""
        for p, anywhere in zip(self.parameters, notes[0].tolist(), strict=True):
            if not anywhere and p.grad is not None and not (late and local(p.grad).any()):
                p.grad = None


class OptimizerState(Live):
    """Entries of the optimizers' state. Every round looks them up, because the first steps create them.

    They are exchanged like the moments in other exchanges, here without parameters.
    """

    _call = "moments"

    def __init__(self, model: nn.Module, keys: Sequence[str]) -> None:
        if not keys or not all(isinstance(key, str) and key for key in keys):
            given = ", ".join(["model", *map(repr, keys)])
            raise ValueError(f'moments({given}): name entries of the optimizer\'s state, such as "exp_avg".')
        super().__init__(model, only=())
        self.keys = tuple(keys)

    def __repr__(self) -> str:
        return f"moments({', '.join(map(repr, self.keys))})"

    def owners(self) -> dict[str, Tensor]:
        return trainable(self.model)


def params(model: nn.Module, only: Sequence[str] | None = None) -> Live:
    """The trainable parameters of a model, or `only` the named ones."""
    return Live(model, only)


def grads(model: nn.Module, *, own: bool = True) -> Gradients:
    """The gradients of the trainable parameters of a model.

    In a step in which no mean lands, a worker uses its own gradients, or zeros with own=False.
    """
    return Gradients(model, own=own)


def moments(model: nn.Module, *keys: str) -> OptimizerState:
    """Entries of the optimizers' state of the trainable parameters, such as `moments(model, "exp_avg")`.

    A round averages the entries that all workers have. Give several keys if optimizers differ: the first
    moment is "exp_avg" in Adam and "momentum_buffer" in SGD.
    """
    return OptimizerState(model, keys)


@torch.no_grad()
def flatten(model: nn.Module) -> nn.Module:
    """Move the trainable parameters into contiguous memory, one vector per dtype and device.

    Blocking averages (`local_sgd`, `qsr`, … with `drift=False`) then work on the weights in place. Parameters
    stay the same objects. Call it when the model is on its device, before or after building the optimizer. If
    a worker is lost in such a round, the others' weights hold partial sums: continue from a checkpoint.

        model = offbeat.flatten(build().to(device))
    """
    parameters = trainable(model)
    for name, p in parameters.items():
        if is_sharded(p) or not p.is_contiguous():
            fault = "sharded" if is_sharded(p) else "not contiguous"
            raise ValueError(
                f"flatten(model): {name!r} is {fault}; only whole, contiguous parameters can be moved."
            )
    for kind in dict.fromkeys((p.dtype, p.device) for p in parameters.values()):
        group = [p for p in parameters.values() if (p.dtype, p.device) == kind]
        flat = torch.cat([p.detach().flatten() for p in group])
        for p, part in zip(group, torch.split(flat, [p.numel() for p in group]), strict=True):
            p.data = part.view(p.shape)
    return model
