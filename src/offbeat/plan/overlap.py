"""Gradients that are sent during the backward pass: in which rounds, and in which buckets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from offbeat.among import World
from offbeat.engine.buckets import cut_sizes
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.plan.job import Job
from offbeat.plan.recording import Event, Events, Sent, Size, Waited
from offbeat.reduce import Mean
from offbeat.update.update import Replace


@dataclass(frozen=True)
class Bucket:
    """One part of the gradients: the share of the step after which it is complete, and what it sends."""

    after: float
    first: Events  # what it sends at once
    rest: Events  # what it waits for, and sends after that

    @property
    def later(self) -> Events:
        """The rest up to the last message that is sent."""
        return self.rest[: len(self.rest) - len(self.waits)]

    @property
    def waits(self) -> Events:
        """What is waited for after all is sent."""
        sent = [number for number, event in enumerate(self.rest, start=1) if isinstance(event, Sent)]
        return self.rest[max(sent, default=0) :]


@dataclass(frozen=True)
class Early:
    """A round whose gradients are sent in buckets.

    With a code, a queue sends the later messages of each bucket, in order, and then waits for the last ones.
    """

    heads: tuple[Events, Events]  # small messages that are sent at the step, and waits for them
    buckets: tuple[Bucket, ...]
    queued: bool

    @property
    def waits(self) -> Events:
        """What the queue waits for in the end."""
        return tuple(event for bucket in self.buckets for event in bucket.waits) if self.queued else ()


def find_buckets(part: Part, job: Job) -> list[tuple[float, float]]:
    """Return for each bucket the share of a step after which it is complete, and its share of the gradients.

    Empty if the part sends its gradients whole, or at the end of the step.
    """
    if not isinstance(part, Exchange) or not part.live.early or part.delay or not job.backward:
        return []
    if not (isinstance(part.peers, World) and part.reduce.splits and isinstance(part.update, Replace)):
        return []
    size = job.parameters // job.layers * torch.empty((), dtype=getattr(torch, job.dtype)).element_size()
    shares = [n / job.layers for n in cut_sizes([size] * job.layers, part.reduce)]
    complete = [1 - job.backward * (1 - done) for done in accumulate(shares)]
    return list(zip(complete, shares, strict=True)) if shares[1:] else []


def cut_round(part: Part, buckets: Sequence[tuple[float, float]], begin: Events, land: Events) -> Early:
    """Cut the messages of a round into buckets."""
    heads = [event.name for event in begin if isinstance(event, Sent) and event.control]

    def own(events: Events) -> Events:
        return tuple(event for event in events if getattr(event, "name", None) not in heads)

    def small(events: Events) -> Events:
        return tuple(event for event in events if getattr(event, "name", None) in heads)

    def cut(events: Events, number: int, share: float) -> Events:
        return tuple(_cut(event, number, share) for event in events)

    parts = [
        Bucket(after, cut(own(begin), number, share), cut(own(land), number, share))
        for number, (after, share) in enumerate(buckets)
    ]
    queued = isinstance(part, Exchange) and part.reduce != Mean()
    return Early((small(begin), small(land)), tuple(parts), queued)


def _cut(event: Event, number: int, share: float) -> Event:
    """Return the event of one bucket, with a name that no other bucket has."""
    assert isinstance(event, Sent | Waited)
    name = (event.name[0], event.name[1] + 1000 * (number + 1))
    if isinstance(event, Waited):
        return replace(event, name=name)
    return replace(event, name=name, given=Size(event.given.whole * share, event.given.cut * share))
