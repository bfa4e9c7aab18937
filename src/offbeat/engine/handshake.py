"""Do all workers train the same model with the same method? If not, every rank names the odd one."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from offbeat.base.errors import Disagreement
from offbeat.base.tensors import named
from offbeat.comm.communicator import Communicator
from offbeat.engine.weights import checksum


def without_addresses(call: str) -> str:
    """Return the call without the addresses of functions in it, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", call)


def describe(call: str, model: nn.Module) -> list[str]:
    """Describe the method and every tensor of the model, one line each; frozen ones with a checksum."""
    lines = [f"the method {call}"]
    tensors = [("parameter", *item) for item in named(model.named_parameters()).items()]
    tensors += [("buffer", *item) for item in named(model.named_buffers()).items()]
    for kind, name, tensor in tensors:
        fixed = kind == "parameter" and not tensor.requires_grad
        frozen = f", frozen with checksum {checksum([tensor])}" if fixed else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{kind} {name} {list(tensor.shape)} {dtype}{frozen}")
    return lines


def compare_lines(lines: Sequence[str], comm: Communicator, *, nonce: int = 0) -> int:
    """Raise on every rank, naming the first that differs from rank 0, unless all have the same lines.

    Returns rank 0's nonce.
    """
    text = "\n".join(lines).encode()
    digest = struct.unpack("<4q", hashlib.sha256(text).digest())
    answers = comm.tell([len(text), *digest, nonce]).wait()
    odd = next((rank for rank, words in enumerate(answers) if words[:5] != answers[0][:5]), None)
    if odd is None:
        return answers[0][5]
    room = torch.zeros(max(words[0] for words in answers), dtype=torch.uint8)
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = comm.gather(room).wait()
    these, those = (bytes(texts[r].tolist())[: answers[r][0]].decode().splitlines() for r in (0, odd))
    pairs = zip_longest(these, those, fillvalue="nothing more")
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    raise Disagreement(
        f"Workers disagree: rank 0 has {ours}, rank {odd} has {theirs}. "
        "Build the same model and method on every worker."
    )
