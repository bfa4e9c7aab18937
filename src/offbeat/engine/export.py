"""Writes the weights of the whole model to one file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.base.files import replacing
from offbeat.base.tensors import clean_names, is_sharded
from offbeat.comm.communicator import Communicator
from offbeat.engine.saving import find_mesh, tell_shards


def check_path(path: str | Path) -> Path:
    """Raise unless a model can be written to a file of this name."""
    path = Path(path)
    if path.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"export({str(path)!r}): the file must be a .safetensors or a .pt.")
    if path.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ImportError(f"export({str(path)!r}): pip install safetensors, or name a .pt.")
    return path


def write_model(path: Path, model: nn.Module, comm: Communicator) -> None:
    """Write the model as one worker has it. Every rank calls this, since shards are gathered."""
    mesh = find_mesh(model)
    first = comm.rank == 0 and not (mesh is not None and any(mesh.get_coordinate() or ()))
    tensors: dict[str, Tensor] = {}
    for name, tensor in clean_names(model.state_dict().items()).items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if first:
            # safetensors refuses tied weights, which share memory.
            tensors[name] = whole.detach().cpu().contiguous().clone()
    error = _write(path, tensors) if first else None
    failed = max(words[0] for words in comm.tell([error is not None]).wait())
    failed = max(words[0] for words in tell_shards([failed], mesh))
    if error is not None:
        raise OSError(f"export({str(path)!r}): {error}") from error
    if failed:
        raise OSError(f"export({str(path)!r}): rank 0 cannot write the file; see its error.")


def _write(path: Path, tensors: dict[str, Tensor]) -> Exception | None:
    try:
        with replacing(path) as temporary:
            if path.suffix == ".pt":
                torch.save(tensors, temporary)
            else:
                from safetensors.torch import save_file

                save_file(tensors, temporary, metadata={"format": "pt"})
    except Exception as error:  # from the disk, torch or safetensors
        return error
    return None
