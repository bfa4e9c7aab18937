"""What travels in a round: live tensors, the model's buffers, and the optimizer's moments."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.base.packed import Packed
from offbeat.base.tensors import Live, OptimizerState, clean_names, local
from offbeat.comm.communicator import Communicator, Pending, arrived
from offbeat.engine.optimizers import check_reset, reset
from offbeat.engine.report import logger

if TYPE_CHECKING:
    from offbeat.engine.round import Round

BufferRule = Literal["average", "keep", "follow"]
MomentRule = Literal["keep", "average", "reset"]


class Buffers:
    """The buffers of a model: averaged, but integers follow rank 0; or all kept; or all follow rank 0."""

    def __init__(self, model: nn.Module, rule: BufferRule) -> None:
        if rule not in get_args(BufferRule):
            raise ValueError(f"buffers={rule!r}: choose one of {', '.join(map(repr, get_args(BufferRule)))}.")
        self.rule = rule
        # Looked up once: walking through a large model takes a millisecond.
        owners = {id(b): (m, key) for m in model.modules() for key, b in m._buffers.items()}
        self._places = {name: owners[id(b)] for name, b in clean_names(model.named_buffers()).items()}
        self.moves = bool(self._places) and rule != "keep"  # whether rounds carry any

    def averaged(self) -> dict[str, Tensor]:
        return self._find(smooth=True) if self.rule == "average" else {}

    def followed(self) -> dict[str, Tensor]:
        """Find the buffers that become those of rank 0."""
        return {} if self.rule == "keep" else self._find(smooth=False if self.rule == "average" else None)

    def follow(self, comm: Communicator) -> Pending[list[Tensor]] | None:
        """Broadcast rank 0's values, one message per dtype and device. None if there are none."""
        mine = list(self.followed().values())
        if not mine:
            return None
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in mine:
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        flats = {kind: torch.cat([b.reshape(-1) for b in group]) for kind, group in groups.items()}
        parts = {k: iter(torch.split(flats[k], [b.numel() for b in group])) for k, group in groups.items()}
        views = [next(parts[b.dtype, b.device]).view(b.shape) for b in mine]
        filled = [flat for flat in flats.values() if flat.numel()]
        return comm.broadcast(filled).then(lambda _: views) if filled else arrived(views)

    def _find(self, *, smooth: bool | None) -> dict[str, Tensor]:
        """Return the floating buffers, the others, or all. A module may have bound other tensors since."""
        found = {name: module._buffers[key] for name, (module, key) in self._places.items()}
        return {
            name: local(buffer)
            for name, buffer in found.items()
            if buffer is not None and smooth in (None, buffer.is_floating_point() or buffer.is_complex())
        }


class Moments:
    """The optimizers' running averages of the live parameters: kept, averaged, or reset at each landing."""

    def __init__(self, live: Live, rule: MomentRule) -> None:
        if rule not in get_args(MomentRule):
            raise ValueError(f"moments={rule!r}: choose one of {', '.join(map(repr, get_args(MomentRule)))}.")
        self._keys = live.keys if isinstance(live, OptimizerState) else None  # None: all keys but "step"
        if self._keys and rule == "reset":
            raise ValueError(f"moments={rule!r} with {live!r}: an exchange of moments averages them.")
        self.rule: MomentRule = "average" if self._keys else rule
        self.travel = self.rule == "average"
        self._live, self._owners = live, live.owners()
        self._missed = False  # whether a round has found none of the keys
        self.optimizers: Sequence[Optimizer] = ()

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        if self.rule == "reset":
            check_reset(optimizers, list(self._owners.values()))

    def collect(self, step: int) -> tuple[dict[str, Tensor], int]:
        """Return the moments that travel, and a digest of their names. Warn once if none has a given key."""
        found = self.find()
        if self._keys and not found and not self._missed:
            self._missed = True
            states = [value for o in self.optimizers for value in o.state.values()]
            known = ", ".join(sorted({key for state in states for key in state if key != "step"}))
            logger.warning(
                "%r: the optimizer's state has no such entry after step %d: nothing is averaged. It has %s.",
                self._live,
                step,
                known or "no tensors",
            )
        return found, digest_names(found)

    def choose(
        self, mine: dict[str, Tensor], heads: Pending[list[list[int]]], round: Round
    ) -> dict[str, Tensor]:
        """Return the moments that all workers have. A worker that skipped its first step may lack some.

        `heads` brings all digests. If they differ, one more message says which parameters have the same ones.
        """
        with round.waiting():
            if len({head[6] >> 31 for head in heads.wait()}) == 1:
                return mine
        own: dict[str, list[str]] = {name: [] for name in self._owners}
        for key in mine:
            own[key.rpartition(":")[0]].append(key)
        digests = torch.tensor([digest_names(keys) for keys in own.values()])
        with round.waiting():
            heard = torch.stack(round.comm.gather(digests).wait())
        common = (heard == heard[0]).all(dim=0).tolist()
        shared = [keys for keys, equal in zip(own.values(), common, strict=True) if equal]
        logger.warning(
            "Not all workers have the optimizer moments of %d of %d tensors: these are not averaged in this "
            "round.",
            common.count(False),
            len(common),
        )
        return {key: mine[key] for keys in shared for key in keys}

    def find(self) -> dict[str, Tensor]:
        """Return tensors of the optimizers' state that have a parameter's shape and a key of the exchange.

        If it names no keys, all but "step", the count of steps.
        """
        return {
            f"{name}:{key}": local(value)
            for name, parameter in self._owners.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(parameter, {}).items()
            if (key in self._keys if self._keys else key != "step")
            and torch.is_tensor(value)
            and value.shape == parameter.shape
        }


def digest_names(names: Iterable[str]) -> int:
    return zlib.crc32(" ".join(names).encode())


def land(now: Sequence[Tensor], news: Sequence[Tensor], sent: Sequence[Tensor] | None) -> None:
    """Without a delay, overwrite the value. With a delay, shift the current value by (new − sent).

    The shift ends between the current and the new value, so that a variance cannot become negative.
    """
    for i, (value, new) in enumerate(zip(now, news, strict=True)):
        if sent is None or value.dtype == torch.bool:
            value.copy_(new)
        else:
            low, high = torch.minimum(value, new), torch.maximum(value, new)
            # Unchanged values stay as they are: a difference of infinities, as in a mask, is NaN.
            moved = torch.where(new == sent[i], value, value + (new - sent[i]))
            # Only averages are clamped; counts are not.
            value.copy_(moved.clamp(low, high) if value.is_floating_point() else moved)


class Payload:
    """The memory from which live tensors, their notes and averaged buffers are sent in every round."""

    def __init__(self, live: Live, buffers: BufferRule, moments: MomentRule, *, in_place: bool) -> None:
        self.live, self._in_place = live, in_place
        self.buffers, self.moments = Buffers(live.model, buffers), Moments(live, moments)
        self.has_extras = self.buffers.moves or self.moments.rule != "keep"
        self.lengths = (len(live.names), len(live.notes()))  # of the live tensors and their notes in a mean

    @cached_property
    def packed(self) -> Packed:
        """All that is sent. In place, this is the live tensors' own memory if that is contiguous."""
        extras = {f"+{name}": t for name, t in {**self.live.notes(), **self.buffers.averaged()}.items()}
        flat = Packed.around(self.live.like()) if self._in_place else None
        if flat is None:
            return Packed.like({**self.live.like(), **extras})
        return flat.beside(Packed.like(extras)) if extras else flat

    @cached_property
    def own(self) -> Packed:
        return self.packed.cut(len(self.live.names))[0]

    def renew(self) -> None:
        """Use new memory from now on, never that of the live tensors."""
        self._in_place = False
        for memory in ("packed", "own"):
            vars(self).pop(memory, None)

    def pack_extras(self, notes: Mapping[str, Tensor]) -> None:
        """Pack what is sent with the live tensors."""
        extras = [*notes.values(), *self.buffers.averaged().values()]
        self.packed.cut(len(self.live.names))[1].read(extras)

    def send_extras(self, moments: dict[str, Tensor], round: Round, factor: float, *, late: bool) -> None:
        """Send rank 0's buffers and the moments. If the round lands late, keep what was sent."""
        if late:
            round.sent = [value.clone() for value in self._extras(moments)]
        round.followed = self.buffers.follow(round.comm)
        if moments:
            packed = Packed.like(moments)
            packed.read(list(moments.values()))
            packed.scale(factor)
            round.moments = round.comm.mean(packed.flats).then(lambda _: packed)
        round.messages += [message for message in (round.followed, round.moments) if message is not None]

    def land_extras(self, buffers: Sequence[Tensor], round: Round) -> None:
        """Apply the buffers and moments that have arrived."""
        news, chosen = list(buffers), {}
        if round.followed is not None:
            news += round.followed.wait()
        if round.moments is not None:
            moments, found = round.moments.wait(), self.moments.find()
            chosen = {name: found[name] for name in moments.names}
            news += moments.views
        if news:
            land(self._extras(chosen), news, round.sent)
        for optimizer in self.moments.optimizers if self.moments.rule == "reset" else ():
            reset(optimizer, self.live.parameters)

    def _extras(self, moments: Mapping[str, Tensor]) -> list[Tensor]:
        """Return averaged buffers, buffers that follow rank 0, and averaged moments."""
        return [*self.buffers.averaged().values(), *self.buffers.followed().values(), *moments.values()]
