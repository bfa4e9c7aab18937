"""Checks that all workers have the same method, model and weights, and checkpoints of one run."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.base.clock import State
from offbeat.base.errors import CheckpointMismatch, Disagreement
from offbeat.base.packed import Packed
from offbeat.base.tensors import clean_names, local, trainable
from offbeat.comm.communicator import Communicator, Pending
from offbeat.engine.extras import Buffers

FORMAT = 9  # of checkpoints. Raise it also when a default changes: the recorded call does not show it.
OWN = "shard"  # entries under this key of a part's state may have other shapes on other ranks
_SHARED = ("planned", "round", "began", "in_air", "step")  # numbers that are equal on all ranks
_PIECE = 2**15  # values per pass of a checksum: few enough to stay in the cache
_MIX, _NEXT = -7046029254386353131, 6364136223846793005  # odd, so that multiplying by them loses no bit
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def without_addresses(call: str) -> str:
    """Return the call without the addresses of functions in it, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", call)


def describe_run(call: str, model: nn.Module) -> list[str]:
    """Describe the method and every tensor of the model, one line each; frozen ones with a checksum."""
    lines = [f"the method {call}"]
    for kind, items in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in clean_names(items).items():
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


def weights_checksum(model: nn.Module) -> int:
    """Return the checksum of this rank's trainable weights."""
    return checksum(list(trainable(model).values()))


def check_step(method: str, step: int, saved_every: Sequence[int]) -> None:
    """Raise unless every part can be saved after this step: a multiple of all `saved_every`."""
    every = math.lcm(*saved_every)
    if step % every:
        raise RuntimeError(
            f"state_dict(): {method} cannot be saved after step {step}, where the workers may be in "
            f"different rounds: the next step that allows it is {-(-step // every) * every}."
        )


def check_origin(
    state: State, method: str, model: nn.Module, comm: Communicator, *, resize: bool = False
) -> tuple[bool, list[int]]:
    """Raise unless all checkpoints are of this method, run and step; without `resize`, also of these ranks.

    Return whether the model has the weights of the checkpoint on all ranks, and the rank of each rank's file.
    """
    ours = origin(method, comm)
    compared = ("format", "method") if resize else tuple(ours)
    wrong = next((what for what in compared if state.get(what) != ours[what]), None)
    mine = [-1]
    if wrong is None:
        loaded = state["weights"] in (None, weights_checksum(model))
        outline = digest("\n".join([f"of {state['workers']}", *_outline(state["parts"])]))
        mine = [state["place"], state["run"], outline, int(loaded), state["rank"]]
    answers = comm.tell(mine).wait()
    if wrong is not None:
        who, hint = ("worker", ": every rank loads its own") if wrong == "rank" else ("run", "")
        theirs = state.get(wrong)
        raise CheckpointMismatch(f"The checkpoint has {wrong} {theirs}, this {who} has {ours[wrong]}{hint}.")
    steps, runs, outlines, weights, ranks = zip(*[words[:5] for words in answers], strict=True)
    if -1 in steps:
        raise CheckpointMismatch(f"Rank {steps.index(-1)} cannot load its checkpoint: see its error.")
    if odd := _find_odd(runs):
        raise CheckpointMismatch(
            f"The checkpoints of rank {odd[0]} and rank {odd[1]} come from different runs: "
            "load the files of one run on every rank."
        )
    for r, step in enumerate(steps):
        if step != steps[0]:
            raise Disagreement(f"Checkpoints disagree: rank 0 loads step {steps[0]}, rank {r} step {step}.")
    if odd := _find_odd(outlines):
        raise CheckpointMismatch(
            f"Rank {odd[0]}'s checkpoint of step {steps[0]} contradicts rank {odd[1]}'s: their rounds or the "
            "shapes of their tensors differ. Load an earlier checkpoint."
        )
    return all(weights), list(ranks)


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


def digest(text: str) -> int:
    """Return a digest of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def copy_state(value: Any) -> Any:
    """Return a deep copy of tensors in dicts and lists."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, dict):
        return {key: copy_state(item) for key, item in value.items()}
    return [copy_state(item) for item in value] if isinstance(value, list) else value


@torch.no_grad()
def run_collective(tensors: Sequence[Tensor], collective: Callable[[list[Tensor]], Pending[Any]]) -> None:
    """Replace the tensors by the result of a collective, such as `comm.mean`, in one message."""
    packed = Packed.like({str(i): tensor for i, tensor in enumerate(tensors)})
    packed.read(tensors)
    collective(packed.flats).wait()
    packed.write(tensors)


def average_where_different(model: nn.Module, comm: Communicator) -> None:
    """Average the weights, and the floating buffers, if they differ between workers. Equal ones stay."""
    # Averaging equal values would change bits: x + x + x times 1/3 is not x.
    kinds = [list(map(local, trainable(model).values())), list(Buffers(model, "average").averaged().values())]
    answers = comm.tell([checksum(tensors) for tensors in kinds]).wait()
    different = [tensors for i, tensors in enumerate(kinds) if len({words[i] for words in answers}) > 1]
    if different:
        run_collective([tensor for tensors in different for tensor in tensors], comm.mean)


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> int:
    """Return 64 bits that depend on every bit of the tensors and its position, and not on the device."""
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


def remember(model: nn.Module) -> Callable[[], None]:
    """Copy the weights and buffers. Return a call that puts them back, to the bit."""
    tensors = list_all(model)
    saved = [tensor.clone() for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, original in zip(tensors, saved, strict=True):
            tensor.copy_(original)

    return restore


@contextmanager
def preserve(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put the weights and buffers back on leaving, to the bit. The call that is yielded does so before."""
    restore = remember(model)
    try:
        yield restore
    finally:
        restore()


def list_all(model: nn.Module) -> list[Tensor]:
    """Return the trainable parameters and every buffer."""
    return [*map(local, trainable(model).values()), *map(local, model.buffers())]
