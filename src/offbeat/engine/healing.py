"""The state that a worker which joins receives, and how it takes the place of an ordinary one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.among import World, communicator
from offbeat.base.clock import Clock, State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.tensors import Share, clean_names, local, trainable
from offbeat.comm.changing import Changing, refusal
from offbeat.engine import agreement
from offbeat.engine.exchange import Exchange
from offbeat.engine.optimizers import learning_rate
from offbeat.engine.part import Part
from offbeat.engine.pull import PseudoSync
from offbeat.engine.report import logger
from offbeat.engine.round import Round
from offbeat.engine.saving import find_mesh
from offbeat.engine.transfer import share, why_unshared
from offbeat.reduce import Reducer
from offbeat.when import Every

if TYPE_CHECKING:
    from offbeat.engine.commits import Commits
    from offbeat.engine.synchronizer import Synchronizer


class Undo(NamedTuple):
    """What sending changes: the states of the code and the guard, the steps counted, gradients as sent."""

    states: dict[str, State]
    tally: State
    share: Share | None


def check_elastic(parts: Sequence[Part], everyone: Changing) -> None:
    """Raise unless a round of these parts can do without a worker, and another one can take its place."""
    exchanges = [part for part in parts if isinstance(part, Exchange)]
    reason = why_unshared(parts)
    if reason is None and all(part.live.early for part in exchanges):
        reason = "a worker that joins would have to receive the optimizers of another one: "
        reason += "use a method that sends parameters, such as diloco"
    for part in parts:
        odd = isinstance(part, Exchange) and (
            not isinstance(part.peers, World) or not part.reduce.agrees or isinstance(part.update, Reducer)
        )
        if reason is None and (odd or not isinstance(part, Exchange | PseudoSync)):
            reason = f"{part!r} keeps what belongs to one worker"
        elif reason is None and isinstance(part, Exchange) and part.when.needs:
            reason = f"{part.when!r} decides by measurements of all workers"
        if reason is None and part.peers.everyone is not everyone:
            reason = "its parts have different groups"
    if reason is not None:
        raise refusal(everyone, reason)
    mesh = find_mesh(parts[0].model)
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"group={everyone!r}: the model is sharded over a mesh of {mesh.ndim} axes, but a worker that "
            "comes and goes can have one: shard the model over one axis."
        )
    if mesh is not None and mesh.size() > 1:
        everyone.shard(communicator(mesh))
    moving = [part for part in exchanges if not part.live.early]
    offsets = sorted(part.when.offset for part in moving if isinstance(part.when, Every))
    periods = [part.when.steps for part in moving if isinstance(part.when, Every)]
    if len(moving) > 1 and any(part.delay for part in moving):
        if len(periods) < len(moving) or len(set(periods)) > 1:
            raise ValueError(
                f"delay={moving[0].delay!r} with group={everyone!r}: rounds of several exchanges may be in "
                "flight at once: give all of them the same period, or no delay."
            )
        gap = min(after - before for before, after in pairwise([*offsets, offsets[0] + periods[0]]))
        if any(part.delay == "round" or (part.delay and part.delay >= gap) for part in moving):
            raise ValueError(
                f"delay={moving[0].delay!r} with group={everyone!r}: each round must land before the "
                f"next one begins, {gap} steps later: choose a smaller delay or fewer fragments."
            )


def find_device(model: nn.Module) -> torch.device:
    """The device of the model's first weight, with its index."""
    return next((local(p).device for p in model.parameters()), torch.device("cpu"))


def capture(run: Synchronizer, commits: Commits) -> State:
    """Return the state between two rounds that any worker may continue from: numbers, strings and tensors."""
    weights = dict(commits.find_consensus())
    for part in run.parts:
        weights |= part.shown()
    for part in run.parts:  # those whose anchor lags behind the consensus, which is not known: the anchor
        if isinstance(part, Exchange) and (anchor := part.anchor) is not None:
            values = dict(zip(anchor.packed.names, anchor.packed.views, strict=True))
            weights |= {name: value for name, value in values.items() if name not in weights}
    return {
        "steps": run.steps,
        "run": run._run,
        "lineage": commits.lineage,
        "rounds": commits.rounds,
        "rates": [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in run.optimizers],
        "parts": [_share(part) for part in run.parts],
        "weights": {name: value.clone() for name, value in weights.items()},
        "buffers": {name: local(b).clone() for name, b in clean_names(run.model.named_buffers()).items()},
    }


def _share(part: Part) -> State:
    with part.ledger.aside() if isinstance(part, Exchange) else nullcontext():
        return share(part, part.state_dict()).state


def find_mean(part: Exchange, round: Round) -> dict[str, Tensor]:
    """Return copies of the means of a round that has arrived, by name."""
    mean = round.take()
    _ = mean.flats  # divided once, for all that read them
    views = mean.cut(*part.payload.lengths)[0].views
    return {name: view.clone() for name, view in zip(part.live.names, views, strict=True)}


@torch.no_grad()
def adopt(run: Synchronizer, commits: Commits, state: State) -> None:
    """Continue from the state of another worker, and move to where the next round begins.

    The worker enters that round without steps of its own, so it counts for nothing there. It comes in time
    even if the state was long on its way.
    """
    _check(run, state)
    run._run, run._started = state["run"], True
    for part, saved in zip(run.parts, state["parts"], strict=True):
        part.load_state_dict(saved)
    agreement.write(run.model, state["weights"])
    for name, buffer in clean_names(run.model.named_buffers()).items():
        local(buffer).copy_(state["buffers"][name])
    commits.keep()
    _set_rates(run, state["rates"])
    parts = [part for part in run.parts if isinstance(part, Exchange)]
    due = [part.rhythm.planned for part in parts if part.rhythm.planned is not None]
    run.steps = min(due) - 1 if due else state["steps"]
    for part in parts:  # it has made none of the steps of this period
        part.tally.skip(run.steps)
    logger.info("%r joins after %d rounds, before step %d", run, commits.rounds, run.steps + 1)
    if run.on_join is not None:
        run.on_join(run)
    if due:
        _skip_step(run)


def _set_rates(run: Synchronizer, found: Sequence[Sequence[float]]) -> None:
    """Take over the learning rates of the others, where no scheduler sets them: most go on from their own."""
    for optimizer, rates in zip(run.optimizers, found, strict=True):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            if "initial_lr" in group:  # a mark that schedulers leave
                continue
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _skip_step(run: Synchronizer) -> None:
    """Make one iteration without a gradient."""
    run._lr, run._dry = learning_rate(run.optimizers), True
    for part in run.parts:
        part.plan(Clock(run.steps, 0, run._lr, dry=True))
    run._after()


def _check(run: Synchronizer, state: State) -> None:
    """Raise unless the state fits the model and the optimizers."""
    ours = {name: list(local(p).shape) for name, p in trainable(run.model).items()}
    theirs = {name: list(value.shape) for name, value in state["weights"].items()}
    groups = [len(optimizer.param_groups) for optimizer in run.optimizers]
    buffers = {name: list(local(b).shape) for name, b in clean_names(run.model.named_buffers()).items()}
    fits = (
        ours == theirs
        and [len(rates) for rates in state["rates"]] == groups
        and {name: list(b.shape) for name, b in state["buffers"].items()} == buffers
        and len(state["parts"]) == len(run.parts)
    )
    if not fits:
        raise CheckpointMismatch(
            "The state of the run does not fit this worker's model and optimizers: build them as the others "
            "do."
        )
