"""Do all workers do the same? One sentence on every rank if not, naming the one that differs."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence

import torch
from torch import nn

from offbeat.base.clock import Clock
from offbeat.base.errors import Disagreement
from offbeat.base.tensors import local, named
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import BATCHES

_KINDS = ("round {round}", "averaged()", "finish()")
ROUND, AVERAGED, FINISH = range(3)


_COMPARED = 6  # the words of a header in which all ranks must agree


def name(kind: int) -> str:
    """What a kind of meeting is called."""
    return _KINDS[kind]


def header(kind: int, part: int, clock: Clock, rates: int, rank: int) -> list[int]:
    """What a rank is about to do, in a few whole numbers; then its number among all workers, since in a
    subgroup it has another."""
    (lr,) = struct.unpack("<q", struct.pack("<d", clock.lr))
    return [kind, part, clock.round, clock.step, lr, rates, rank]


def compare_headers(headers: Sequence[Sequence[int]]) -> list[int]:
    """Raise if the ranks are not all at the same point; what each has told behind its header."""
    first = headers[0]
    for other in headers:
        if other[:_COMPARED] != first[:_COMPARED]:
            field = next(i for i in range(_COMPARED) if other[i] != first[i])
            if first[0] != ROUND and field == 3:
                field = 0  # both in finish(), but not after the same step
            raise Disagreement(_SENTENCES[field].format(**_words(first, ""), **_words(other, "o_")))
    return [heard[_COMPARED + 1] for heard in headers]


_SENTENCES = (
    "Workers disagree: rank {rank} is in {kind} at step {step}, rank {o_rank} in {o_kind} at step {o_step}. "
    f"{BATCHES}",
    "Workers disagree: rank {rank} is at exchange {part} of the method, rank {o_rank} at {o_part}.",
    "Workers disagree: rank {rank} is at round {round} (step {step}), rank {o_rank} at round {o_round} "
    "(step {o_step}).",
    "Workers disagree at round {round}: rank {rank} is at step {step}, rank {o_rank} at step {o_step}. "
    "Does every worker use the same schedule?",
    "Workers disagree in {kind} at step {step}: rank {rank} has learning rate {lr}, rank {o_rank} {o_lr}. "
    "Step the learning-rate scheduler alike everywhere.",
    "Workers disagree in {kind} at step {step}: rank {rank} and rank {o_rank} have other learning rates in "
    "one of the parameter groups. Step the learning-rate scheduler alike everywhere.",
)


def _words(header: Sequence[int], prefix: str) -> dict[str, object]:
    kind, part, round, step, lr, _, rank = header[:7]
    (rate,) = struct.unpack("<d", struct.pack("<q", lr))
    kinds = _KINDS[kind].format(round=round)
    values = {"kind": kinds, "part": part, "round": round, "step": step, "lr": rate, "rank": rank}
    return {prefix + name: value for name, value in values.items()}


def without_addresses(call: str) -> str:
    """The call without the addresses of functions in it, which are different in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", call)


def describe(call: str, model: nn.Module) -> list[str]:
    """The method and every tensor of the model, one line each; frozen ones with a checksum."""
    lines = [f"the method {call}"]
    for name, p in named(model.named_parameters()).items():
        frozen = "" if p.requires_grad else f", frozen with checksum {checksum(p)}"
        lines.append(f"parameter {name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}{frozen}")
    for name, b in named(model.named_buffers()).items():
        lines.append(f"buffer {name} {list(b.shape)} {str(b.dtype).removeprefix('torch.')}")
    return lines


def checksum(tensor: torch.Tensor) -> int:
    """The sum of the bits read as whole numbers: exact, so the same in whatever order it is taken."""
    flat = local(tensor).detach().contiguous().view(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    return int(flat.view(whole).sum(dtype=torch.int64))


def compare_lines(lines: Sequence[str], comm: Communicator, *, nonce: int = 0) -> int:
    """Raise on every rank, naming the first that differs from rank 0, unless all have the same lines.

    Returns rank 0's nonce.
    """
    text = "\n".join(lines).encode()
    mine = struct.unpack("<4q", hashlib.sha256(text).digest())
    told = comm.tell([len(text), *mine, nonce]).wait()
    heard = [word[:5] for word in told]
    if all(word == heard[0] for word in heard):
        return told[0][5]
    room = torch.zeros(max(word[0] for word in heard), dtype=torch.uint8)
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [
        bytes(part.tolist())[: word[0]].decode().splitlines()
        for part, word in zip(comm.gather(room).wait(), heard, strict=True)
    ]
    rank = next(rank for rank, word in enumerate(heard) if word != heard[0])
    ours, theirs = _first_difference(texts[0], texts[rank])
    raise Disagreement(
        f"Workers disagree: rank 0 has {ours}, rank {rank} has {theirs}. "
        "Build the same model and method on every worker."
    )


def _first_difference(these: Sequence[str], those: Sequence[str]) -> tuple[str, str]:
    end = "nothing more"
    for i in range(max(len(these), len(those))):
        this, that = (lines[i] if i < len(lines) else end for lines in (these, those))
        if this != that:
            return this, that
    raise AssertionError("the texts are equal")
