"""One rank's shard of the server: a slice of the weights, and the optimizer that steps it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.clock import State
from offbeat.server.replica import GroupOptions, GroupSpan

OptimizerFactory = Callable[[Any], Optimizer]

# These say how a step is computed, not what it computes. decoupled_weight_decay only tells AdamW from Adam.
_OWN = {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class Shard:
    """Slice `rank` of flat vectors that are cut into `workers` equal slices. `place` is (rank, workers)."""

    def __init__(
        self,
        flats: Sequence[Tensor],
        spans: Sequence[GroupSpan],
        place: tuple[int, int],
        server: OptimizerFactory,
        groups: int,
    ) -> None:
        rank, workers = place
        sizes = [flat.numel() // workers for flat in flats]
        self.weights = [flat[rank * n : (rank + 1) * n].clone() for flat, n in zip(flats, sizes, strict=True)]
        self._pieces: list[tuple[Tensor, int, slice]] = []  # weights of one group, their flat and place in it
        members: list[dict[str, Any]] = [{"params": []} for _ in range(groups)]
        for span in spans:
            n = sizes[span.flat]
            low, high = max(span.start - rank * n, 0), min(span.stop - rank * n, n)
            if low < high:
                piece = self.weights[span.flat][low:high]
                self._pieces.append((piece, span.flat, slice(low, high)))
                members[span.group]["params"].append(piece)
        self.optimizer = server(members)

    def apply(self, gradients: Sequence[Tensor], options: GroupOptions) -> None:
        """Step the server's optimizer with the mean gradient of this slice."""
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


def read_options(groups: GroupOptions) -> GroupOptions:
    """The current lr, momentum, … of the user's optimizer, which the server's optimizer adopts."""
    return [
        {
            key: float(value) if torch.is_tensor(value) else value
            for key, value in group.items()
            if key not in _OWN
        }
        for group in groups
    ]


def check_server(server: OptimizerFactory | None, optimizers: Sequence[Optimizer]) -> OptimizerFactory:
    """The factory of the server's optimizer. Refuses optimizers that cannot step a slice on its own."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        dampening = next((g["dampening"] for g in optimizer.param_groups if g.get("dampening")), None)
        if server is None and (dampening is not None or not isinstance(optimizer, torch.optim.SGD)):
            call = kind if dampening is None else f"{kind}(dampening={dampening})"
            raise ValueError(
                f"The optimizer is {call}, but by default the server steps like torch.optim.SGD without "
                f"dampening: for another rule, such as this one, pass server=torch.optim.{kind}."
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError(f"{kind}(maximize=True): a server only minimizes: negate the loss instead.")
        if any(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(f"{kind}(fused=True): AMP would leave its gradients scaled: build it unfused.")
    factory: OptimizerFactory = torch.optim.SGD if server is None else server
    if isinstance(factory, Optimizer):
        raise TypeError(
            f"server={type(factory).__name__}(...): this optimizer already has parameters: pass a function "
            "that makes one, such as torch.optim.Adam."
        )
    if not callable(factory):
        raise TypeError(
            f"server={server!r}: pass a function that makes an optimizer, such as torch.optim.Adam."
        )
    if server is not None and not _steps_elementwise(factory):
        raise ValueError(
            f"server={server!r}: it does not step the pieces of a tensor as it steps the whole, so it cannot "
            "be sharded: choose an elementwise optimizer, such as torch.optim.Adam."
        )
    return factory


def _steps_elementwise(server: OptimizerFactory) -> bool:
    """Whether two steps of four weights give the same result in one piece and in two."""
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
