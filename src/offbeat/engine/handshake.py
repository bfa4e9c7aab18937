"""Do all workers do the same? If not, every rank raises one sentence that names the odd one."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from offbeat.base.clock import Clock
from offbeat.base.errors import Disagreement
from offbeat.base.tensors import named
from offbeat.comm.communicator import Communicator
from offbeat.comm.presence import BATCHES
from offbeat.engine.weights import checksum

KINDS = ("round {round}", "averaged()", "finish()")
ROUND, AVERAGED, FINISH = range(3)

# One sentence for each word of a header in which all ranks must agree.
_SENTENCES = (
    "Workers disagree: rank {rank} is in {kind} at step {step}, rank {o_rank} in {o_kind} at step {o_step}. "
    f"{BATCHES}",
    "Workers disagree: rank {rank} is at exchange {part} of the method, rank {o_rank} at {o_part}.",
    "Workers disagree: rank {rank} is at round {round} (step {step}), rank {o_rank} at round {o_round} "
    "(step {o_step}).",
    "Workers disagree at round {round}: rank {rank} is at step {step}, rank {o_rank} at step {o_step}. "
    "Does every worker use the same schedule?",
    "Workers disagree in {kind} at step {step}: rank {rank} has learning rate {lr}, rank {o_rank} {o_lr}. "
    "Step the learning-rate scheduler on every worker.",
    "Workers disagree in {kind} at step {step}: the learning rates of rank {rank} and rank {o_rank} differ "
    "in a parameter group. Step the learning-rate scheduler on every worker.",
)


def header(kind: int, part: int, clock: Clock, rates: int, rank: int) -> list[int]:
    """Return what a rank is about to do, in whole numbers. `rank` is its number among all workers."""
    (lr,) = struct.unpack("<q", struct.pack("<d", clock.lr))
    return [kind, part, clock.round, clock.step, lr, rates, rank]


def compare_headers(headers: Sequence[Sequence[int]]) -> list[int]:
    """Raise unless all ranks are at the same point. Return the word that each sent after its header."""
    first, compared = headers[0], len(_SENTENCES)
    for other in headers:
        if other[:compared] != first[:compared]:
            field = next(i for i in range(compared) if other[i] != first[i])
            if first[0] != ROUND and field == 3:
                field = 0  # both in finish(), but not after the same step
            words = _name_words(first) | {f"o_{name}": word for name, word in _name_words(other).items()}
            raise Disagreement(_SENTENCES[field].format(**words))
    return [words[compared + 1] for words in headers]


def _name_words(header: Sequence[int]) -> dict[str, object]:
    kind, part, round, step, lr, _, rank = header[:7]
    (rate,) = struct.unpack("<d", struct.pack("<q", lr))
    name = KINDS[kind].format(round=round)
    return {"kind": name, "part": part, "round": round, "step": step, "lr": rate, "rank": rank}


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
