"""Do all workers train one model with one method, from checkpoints of one run? If not, every rank raises."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from offbeat.base.clock import State
from offbeat.base.errors import CheckpointMismatch, Disagreement
from offbeat.base.tensors import named, trainable
from offbeat.comm.communicator import Communicator
from offbeat.engine.weights import checksum

FORMAT = 2
OWN = "shard"  # entries under this key of a part's state may have other shapes on other ranks
_SHARED = ("planned", "round", "began", "in_air", "step")  # numbers that are equal on all ranks


def without_addresses(call: str) -> str:
    """Return the call without the addresses of functions in it, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", call)


def describe(call: str, model: nn.Module) -> list[str]:
    """Describe the method and every tensor of the model, one line each; frozen ones with a checksum."""
    lines = [f"the method {call}"]
    for kind, items in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named(items).items():
            fixed = kind == "parameter" and not tensor.requires_grad
            frozen = f", frozen with checksum {checksum([tensor])}" if fixed else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"{kind} {name} {list(tensor.shape)} {dtype}{frozen}")
    return lines


def compare_lines(lines: Sequence[str], comm: Communicator, *, nonce: int = 0) -> int:
    """Raise unless all ranks have the same lines, naming the first that differs. Return rank 0's nonce."""
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


def origin(method: str, comm: Communicator) -> State:
    """Return what a checkpoint records about its run."""
    return {"format": FORMAT, "method": method, "workers": comm.size, "rank": comm.rank}


def identity(method: str, nonce: int, model: nn.Module) -> int:
    """Return a number for a run, the same on all ranks, which start with rank 0's weights."""
    return _digest(f"{method} {nonce} {weights_checksum(model)}")


def weights_checksum(model: nn.Module) -> int:
    """Return the checksum of this rank's trainable weights."""
    return checksum(list(trainable(model).values()))


def check_step(method: str, step: int, saved_every: Sequence[int]) -> None:
    """Raise unless every part can be saved after this step. Each can be saved after every so many steps."""
    every = math.lcm(*saved_every)
    if step % every:
        raise RuntimeError(
            f"state_dict(): {method} cannot be saved after step {step}, where the workers may be in "
            f"different rounds: the next step that allows it is {-(-step // every) * every}."
        )


def check_origin(state: State, method: str, model: nn.Module, comm: Communicator) -> bool:
    """Raise unless all ranks load checkpoints of this method and of one run and step.

    Return whether the model holds the weights saved with them, on all ranks.
    """
    ours = origin(method, comm)
    wrong = next((what for what in ours if state.get(what) != ours[what]), None)
    mine = [-1, 0, 0, 0]
    if wrong is None:
        loaded = state["weights"] in (None, weights_checksum(model))
        mine = [state["steps"], state["run"], _digest("\n".join(_outline(state["parts"]))), int(loaded)]
    answers = comm.tell(mine).wait()
    if wrong is not None:
        who, hint = ("worker", ": every rank loads its own") if wrong == "rank" else ("run", "")
        theirs = state.get(wrong)
        raise CheckpointMismatch(f"The checkpoint has {wrong} {theirs}, this {who} has {ours[wrong]}{hint}.")
    steps, runs, outlines, weights = zip(*[words[:4] for words in answers], strict=True)
    if -1 in steps:
        raise CheckpointMismatch(f"Rank {steps.index(-1)} cannot load its checkpoint: see its error.")
    if odd := _find_odd(runs):
        raise CheckpointMismatch(
            f"The checkpoints of rank {odd[0]} and rank {odd[1]} come from different runs: "
            "load the files of one run on every rank."
        )
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise Disagreement(
                f"Checkpoints disagree: rank 0 loads step {steps[0]}, rank {rank} step {step}."
            )
    if odd := _find_odd(outlines):
        raise CheckpointMismatch(
            f"Rank {odd[0]}'s checkpoint of step {steps[0]} contradicts rank {odd[1]}'s: their rounds or the "
            "shapes of their tensors differ. Load an earlier checkpoint."
        )
    return all(weights)


def check_weights(expected: int, model: nn.Module, comm: Communicator) -> None:
    """Raise unless the model holds the weights saved with the checkpoint, on all ranks."""
    answers = comm.tell([int(expected in (None, weights_checksum(model)))]).wait()
    if wrong := [rank for rank, words in enumerate(answers) if not words[0]]:
        raise CheckpointMismatch(
            f"The weights of rank {', '.join(map(str, wrong))} are not those saved with the checkpoint: "
            "load model and synchronizer from the same file on every rank."
        )


def _find_odd(values: Sequence[int]) -> tuple[int, int] | None:
    """Return the first rank with an unusual value and the first with the usual one, if they differ."""
    usual = Counter(values).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    return (odd[0], values.index(usual)) if odd else None


def _outline(value: Any, name: str = "") -> Iterator[str]:
    """Yield what must be equal on all ranks in the state of a part: keys, shapes and rounds."""
    if torch.is_tensor(value):
        yield f"{name} {value.dtype} {list(value.shape)}"
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != OWN:
                yield from _outline(item, f"{name}.{key}")
    elif isinstance(value, list) and not all(isinstance(item, float) for item in value):
        for index, item in enumerate(value):
            yield from _outline(item, f"{name}.{index}")
    elif value is None or name.rpartition(".")[2] in _SHARED:
        yield f"{name} {value}"


def _digest(text: str) -> int:
    """Return a digest of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def copy_state(value: Any) -> Any:
    """Return a deep copy of tensors in dicts and lists."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, dict):
        return {key: copy_state(item) for key, item in value.items()}
    return [copy_state(item) for item in value] if isinstance(value, list) else value
