"""One rank's share of the server: a slice of the weights, and the optimizer that steps it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.clock import State
from offbeat.server.groups import Groups, GroupSpan

Factory = Callable[[Any], Optimizer]
Options = list[dict[str, Any]]

# How a step is computed, not which; the last is all that tells AdamW from Adam.
_OWN = {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class Shard:
    """Slice `rank` of vectors that are cut into as many equal slices as there are workers."""

    def __init__(
        self,
        flats: Sequence[Tensor],
        runs: Sequence[GroupSpan],
        place: tuple[int, int],
        server: Factory,
        groups: int,
    ) -> None:
        rank, workers = place
        sizes = [flat.numel() // workers for flat in flats]
        self.weights = [flat[rank * n : (rank + 1) * n].clone() for flat, n in zip(flats, sizes, strict=True)]
        self._pieces: list[tuple[Tensor, int, slice]] = []  # a part of the slice, of which vector, and where
        members: list[dict[str, Any]] = [{"params": []} for _ in range(groups)]
        for run in runs:
            n = sizes[run.flat]
            low, high = max(run.start - rank * n, 0), min(run.stop - rank * n, n)
            if low < high:
                piece = self.weights[run.flat][low:high]
                self._pieces.append((piece, run.flat, slice(low, high)))
                members[run.group]["params"].append(piece)
        self.optimizer = server(members)

    def apply(self, gradients: Sequence[Tensor], options: Options) -> None:
        """One step of the server's optimizer, with the mean gradient of this slice."""
        for group, now in zip(self.optimizer.param_groups, options, strict=True):
            group.update((key, now[key]) for key in group.keys() & now.keys())
        for piece, flat, place in self._pieces:
            piece.grad = gradients[flat][place]
        self.optimizer.step()
        for piece, *_ in self._pieces:
            piece.grad = None

    def state_dict(self) -> State:
        return {
            "weights": [weight.clone() for weight in self.weights],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state: State) -> None:
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])


def options_of(groups: Groups) -> Options:
    """What the server's optimizer takes over from the user's, as it is now: the rate, momentum, …"""
    return [
        {
            key: float(value) if torch.is_tensor(value) else value
            for key, value in group.items()
            if key not in _OWN
        }
        for group in groups
    ]


def check_server(server: Factory | None, optimizers: Sequence[Optimizer]) -> Factory:
    """What makes the server's optimizer; refuses what cannot step a slice as it would step the whole."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if server is None and not _plain(optimizer):
            raise ValueError(
                f"The optimizer is {_told(optimizer)}: by itself the server steps as torch.optim.SGD without "
                f"dampening does; for another rule, such as this one, pass server=torch.optim.{kind}."
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError(f"{kind}(maximize=True): a server descends: negate the loss instead.")
        if any(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(f"{kind}(fused=True): its gradients stay scaled by AMP: build it without fused.")
    factory: Factory = torch.optim.SGD if server is None else server
    if isinstance(factory, Optimizer):
        raise TypeError(
            f"server={type(factory).__name__}(...): this optimizer is already bound to parameters: "
            "pass what makes one, such as torch.optim.Adam."
        )
    if not callable(factory):
        raise TypeError(f"server={server!r}: what makes an optimizer is needed, such as torch.optim.Adam.")
    if server is not None and not _elementwise(factory):
        raise ValueError(
            f"server={server!r}: it does not step the pieces of a tensor as it steps the whole, so it cannot "
            "be cut among the workers: choose one that treats each weight alone, such as torch.optim.Adam."
        )
    return factory


def _plain(optimizer: Optimizer) -> bool:
    sgd = isinstance(optimizer, torch.optim.SGD)
    return sgd and not any(group["dampening"] for group in optimizer.param_groups)


def _told(optimizer: Optimizer) -> str:
    dampening = next((g["dampening"] for g in optimizer.param_groups if g.get("dampening")), None)
    return type(optimizer).__name__ + ("" if dampening is None else f"(dampening={dampening})")


def _elementwise(server: Factory) -> bool:
    """Whether two steps of four weights end where those of one and three of them do."""
    start = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    ends = []
    for cuts in ([4], [1, 3]):
        pieces = [piece.clone() for piece in torch.split(start, cuts)]
        try:
            optimizer = server([{"params": pieces}])
            for gradient in (start * 0.5, start.flip(0)):
                for piece, part in zip(pieces, torch.split(gradient, cuts), strict=True):
                    piece.grad = part.clone()
                optimizer.step()
        except (TypeError, ValueError, RuntimeError):
            return False
        ends.append(torch.cat(pieces))
    return torch.equal(*ends)
