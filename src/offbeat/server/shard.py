"""A worker's own weights, the server's weights on one rank, and the messages between the two."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from offbeat.base import bare
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live, local
from offbeat.comm.background import TaskQueue
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.engine.report import naming
from offbeat.engine.round import Round
from offbeat.server.rules import Flats, LocalRule, ParamSlice

OptimizerFactory = Callable[[Any], Optimizer]
GroupOptions = list[dict[str, Any]]  # lr, momentum, … of each parameter group
GroupSpan = tuple[int, slice, int]  # values of one parameter group: the vector, the slice of it, the group

# These say how a step is computed, not what it computes. decoupled_weight_decay only tells AdamW from Adam.
_OWN = {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
_PARTS = 4  # of a slice: while one is summed, the others are in flight


class Replica:
    """The weights a worker moves (`base`), those it last pulled, and the displacement between two pulls."""

    def __init__(self, base: Packed, parameters: Flats, optimizers: Sequence[Optimizer]) -> None:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self.base, self.spans = base, _find_spans(base, parameters, groups)
        self.pulled = [flat.clone() for flat in base.flats]
        self.displacement = [torch.zeros_like(flat) for flat in base.flats]
        # Server learning rates by parameter group, summed over that displacement and over the pushes since.
        self.lr_sum, self.next_lr_sum = [0.0] * len(groups), [0.0] * len(groups)

    def rebase(self, weights: list[Tensor]) -> float:
        """Set the base to the pulled weights, and keep their memory. Return the length of the change."""
        self.displacement, self.pulled = self.pulled, weights
        self.lr_sum, self.next_lr_sum = self.next_lr_sum, [0.0] * len(self.lr_sum)
        moved = 0.0
        for base, pulled, displacement in zip(self.base.flats, weights, self.displacement, strict=True):
            displacement.sub_(pulled)
            change = float(torch.linalg.vector_norm(base.sub_(pulled), dtype=torch.float64))
            moved += change * change  # ** would raise on overflow
            base.copy_(pulled)
        return math.sqrt(moved)

    def step(self, rule: LocalRule, gradient: Flats, options: GroupOptions, origin: Flats | None) -> None:
        """Take one local step."""
        for flat, place, group in self.spans:
            flats = self.base.flats, gradient, self.displacement
            base, slope, moved = (vectors[flat][place] for vectors in flats)
            start = None if origin is None else origin[flat][place]
            lr, decay = options[group]["lr"], options[group].get("weight_decay", 0.0)
            rule.move(ParamSlice(base, slope, moved, self.lr_sum[group], start, lr, decay))

    def state_dict(self) -> State:
        flats = {"base": self.base.flats, "pulled": self.pulled, "displacement": self.displacement}
        return {**copy.deepcopy(flats), "lr_sums": [self.lr_sum, self.next_lr_sum]}

    def load_state_dict(self, state: State) -> None:
        values = [*state["base"], *state["pulled"], *state["displacement"]]
        for flat, saved in zip([*self.base.flats, *self.pulled, *self.displacement], values, strict=True):
            flat.copy_(saved)
        self.lr_sum, self.next_lr_sum = state["lr_sums"]


def _find_spans(packed: Packed, parameters: Flats, groups: Sequence[Flats]) -> list[GroupSpan]:
    """Return the fewest spans that cover all parameters of the groups, in order."""
    group_of = {id(p): i for i, group in enumerate(groups) for p in group}
    spans: list[GroupSpan] = []
    for (flat, start, n), p in sorted(zip(packed.spans, parameters, strict=True), key=lambda row: row[0]):
        group = group_of.get(id(p), -1)  # -1: no optimizer holds it
        last, before, same = spans[-1] if spans else (-1, slice(0), -1)
        if (last, before.stop, same) == (flat, start, group):
            spans[-1] = (flat, slice(before.start, start + n), group)
        elif n:
            spans.append((flat, slice(start, start + n), group))
    return [span for span in spans if span[2] >= 0]


class Shard:
    """The server's weights on one rank: slice `rank` of a replica's vectors, cut into `workers` slices."""

    def __init__(self, replica: Replica, rank: int, workers: int, server: OptimizerFactory) -> None:
        self.whole = replica.base  # the layout of all slices
        self.weights = [flat.chunk(workers)[rank].clone() for flat in replica.base.flats]
        self._pieces: list[tuple[Tensor, int, slice]] = []  # weights of one group, their flat and place in it
        members: list[dict[str, Any]] = [{"params": []} for _ in replica.lr_sum]
        for flat, place, group in replica.spans:
            n = self.weights[flat].numel()
            low, high = max(place.start - rank * n, 0), min(place.stop - rank * n, n)
            if low < high:
                piece = self.weights[flat][low:high]
                self._pieces.append((piece, flat, slice(low, high)))
                members[group]["params"].append(piece)
        self.optimizer = server(members)

    def apply(self, gradients: Flats, options: GroupOptions) -> None:
        """Step the server's optimizer with the mean gradient of this slice."""
        for group, now in zip(self.optimizer.param_groups, options, strict=True):
            group.update((key, now[key]) for key in group.keys() & now.keys())
        for piece, flat, place in self._pieces:
            piece.grad = gradients[flat][place]
        self.optimizer.step()
        for piece, *_ in self._pieces:
            piece.grad = None

    def state_dict(self) -> State:
        return copy.deepcopy({"weights": self.weights, "optimizer": self.optimizer.state_dict()})

    def load_state_dict(self, state: State) -> None:
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])


def read_options(optimizers: Sequence[Optimizer]) -> GroupOptions:
    """Return the current lr, momentum, … of the user's optimizers, which the server's optimizer adopts."""
    return [
        {key: float(v) if torch.is_tensor(v) else v for key, v in group.items() if key not in _OWN}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def check_server(server: OptimizerFactory | None, optimizers: Sequence[Optimizer]) -> OptimizerFactory:
    """Return the factory of the server's optimizer. Refuse one that cannot step a slice by itself."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        dampening = next((g["dampening"] for g in optimizer.param_groups if g.get("dampening")), None)
        if server is None and (dampening is not None or not isinstance(optimizer, torch.optim.SGD)):
            call = kind if dampening is None else f"{kind}(dampening={dampening})"
            default = "by default the server steps like torch.optim.SGD without dampening"
            advice = f"for another rule, such as this one, pass server=torch.optim.{kind}."
            raise ValueError(f"The optimizer is {call}, but {default}: {advice}")
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError(f"{kind}(maximize=True): a server only minimizes: negate the loss instead.")
        if any(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(f"{kind}(fused=True): AMP would leave its gradients scaled: build it unfused.")
    if server is None:
        return bare.SGD
    advice = "pass a function that makes an optimizer, such as torch.optim.Adam."
    if isinstance(server, Optimizer):
        kind = type(server).__name__
        raise TypeError(f"server={kind}(...): this optimizer already has parameters: {advice}")
    if not callable(server):
        raise TypeError(f"server={server!r}: {advice}")
    if not _steps_elementwise(server):
        reason = "it does not step the pieces of a tensor as it steps the whole, so it cannot be sharded"
        raise ValueError(
            f"server={server!r}: {reason}: choose an elementwise optimizer, such as torch.optim.Adam."
        )
    return server


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


class Slot:
    """Memory for one push, free again once the server has applied it."""

    def __init__(self, live: Live, like: Packed) -> None:
        self._live, self._filled = live, set[int]()
        self.packed = like.over([torch.zeros_like(flat) for flat in like.flats])
        self.applied: Pending[None] = arrived(None)  # the push that uses this memory

    def fill(self, optimizer: Optimizer) -> None:
        """Copy the current gradients of an optimizer's parameters."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        views, gradients = [], []
        for name, p, view in zip(self._live.names, self._live.parameters, self.packed.views, strict=True):
            if id(p) in held and p.grad is not None:
                if p.grad.layout != torch.strided:
                    raise TypeError(f"The gradient of {name!r} is sparse: build its layer with sparse=False.")
                views.append(view)
                gradients.append(local(p.grad))
        if views:
            torch._foreach_copy_(views, gradients)
            self._filled.update(map(id, views))

    def finish(self) -> list[Tensor]:
        """Return the gradient of the step, with zeros where none was filled in."""
        for view in self.packed.views:
            if id(view) not in self._filled:
                view.zero_()
        self._filled.clear()
        return self.packed.flats


class Transport:
    """Three task queues, each with a duplicate of the communicator, so that its messages keep their order.

    The first applies pushes and fetches pulls strictly in order. The other two carry alternate gradients, so
    the next push uses the link while the previous one finishes.
    """

    def __init__(self) -> None:
        self.queues: list[TaskQueue] = []
        self.comms: list[Metered] = []  # the first counts bytes of all queues that no round has counted

    def connect(self, comm: Communicator) -> None:
        """Open the connections, once; all ranks must take part."""
        if not self.queues:
            self.queues = [comm.worker.task_queue() for _ in range(3)]
            self.comms = [Metered(comm.worker.duplicate()) for _ in range(3)]

    def push(
        self, gradient: list[Tensor], shard: Shard, options: GroupOptions, heads: Pending[Any], clock: Clock
    ) -> Pending[None]:
        """Average a gradient and apply it to the shard, if the headers show all workers at the same step."""
        lane = 1 + clock.step % 2
        comm = self.comms[lane]

        def average() -> tuple[list[Tensor], int]:
            with record_function("offbeat.push"), naming(clock), torch.no_grad():
                heads.wait()
                before = comm.sent
                return [reduce_scatter(flat, comm) for flat in gradient], comm.sent - before

        def apply() -> None:
            means, sent = averaged.wait()
            shard.apply(means, options)
            self.comms[0].sent += sent

        averaged = self.queues[lane].give(average)
        return self.queues[0].give(apply)

    def fetch(self, shard: Shard, clock: Clock, round: Round | None = None) -> Pending[Packed]:
        """Return the weights after all pushes so far. A round counts the bytes sent since the last one."""
        comm = self.comms[0]

        def gather() -> Packed:
            with record_function("offbeat.pull"), naming(clock), torch.no_grad():
                weights = gather_weights(shard.weights, comm)
            if round is not None:
                round.comm.sent += comm.sent
                round.comm.received += comm.sent
                comm.sent = 0
            return shard.whole.over(weights)

        return self.queues[0].give(gather)


def reduce_scatter(flat: Tensor, comm: Communicator) -> Tensor:
    """Return the mean of this rank's slice. Partial sums go around a ring; each rank adds its own values.

    In an all-to-all of as many bytes, several ranks send to the same one, which takes 1.5 times as long.
    """
    if comm.size == 1 or not flat.numel():
        return flat.clone()
    slices = [part.chunk(_PARTS) for part in flat.chunk(comm.size)]
    moving = [comm.shift(part.clone()) for part in slices[comm.rank - 1]]
    for ahead in range(2, comm.size + 1):
        for i, own in enumerate(slices[comm.rank - ahead]):
            total = moving[i].wait().add_(own)
            moving[i] = comm.shift(total) if ahead < comm.size else arrived(total)
    return torch.cat([message.wait() for message in moving]).mul_(1 / comm.size)


def gather_weights(slices: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the vectors made of every rank's slices. Each is sent in two halves, to keep both in flight."""
    messages = [[comm.gather(half) for half in own.chunk(2) if half.numel()] for own in slices]
    weights = []
    for halves, own in zip(messages, slices, strict=True):
        parts = [half.wait() for half in halves]
        ranks = [half[rank] for rank in range(comm.size) for half in parts]
        weights.append(torch.cat([own[:0], *ranks]))
    return weights
