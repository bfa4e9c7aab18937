"""What a worker does when it runs out of data before the others: it is dry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from offbeat.base.tensors import Gradients
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part

T = TypeVar("T")


def check_dry(parts: Sequence[Part], call: str) -> None:
    """Raise unless rounds work without the steps of a dry worker, and show when all are dry."""
    advice = "give every worker the same number of batches"
    for part in parts:
        if not part.weighs:
            raise ValueError(f"{call}: {part!r} does not weigh workers: {advice}.")
        if isinstance(part, Exchange) and "loss" in part.when.needs:
            raise ValueError(f"{call}: {part.when!r} needs a loss from every worker: {advice}.")
    if not _find_common(parts):
        raise ValueError(
            f"{call}: no round of this method has all workers, so none can show that all are done: {advice}."
        )


def check_loader(loader: Iterable[T]) -> Iterable[T]:
    if not isinstance(loader, Iterable):
        raise TypeError(f"batches({loader!r}): pass a DataLoader, or anything else that yields batches.")
    return loader


def _find_common(parts: Sequence[Part]) -> list[Exchange]:
    """Return the exchanges whose rounds include all workers."""
    return [part for part in parts if isinstance(part, Exchange) and part.common]


def are_all_dry(parts: Sequence[Part]) -> bool:
    """Whether each exchange among all workers has had a round in which all were dry, or plans none."""
    return all(part.tally.ended or part.tally.idle for part in _find_common(parts))


def revive(parts: Sequence[Part], step: int) -> None:
    """All workers have run dry. They may continue together, with new data."""
    for part in parts:
        if isinstance(part, Exchange):
            part.tally.revive(step)


def takes_mean(parts: Sequence[Part], step: int) -> bool:
    """Whether the optimizers of a dry worker make this step, with the mean gradient of the others."""
    for part in parts:
        if isinstance(part, Exchange) and isinstance(part.live, Gradients):
            # Without a mean, gradients that are not the worker's own are zeros.
            if part.landed_at == step or not (part.live.own or part.tally.void_at == step):
                return True
    return False
