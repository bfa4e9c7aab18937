"""What an actor of a simulation can wait for: a collective, or a condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.comm.collective import Collective, nbytes
from offbeat.simulate.network import Traffic


@dataclass
class Post:
    """One worker's part of a collective."""

    kind: Collective
    tensors: list[Tensor]
    when: float

    def __str__(self) -> str:
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors]
        return f"{self.kind.name} of {', '.join(shapes)}"


@dataclass
class Call:
    """One collective: what its members have posted, and when its results land."""

    members: tuple[int, ...]
    posts: dict[int, Post] = field(default_factory=dict)
    results: list[list[Tensor]] = field(default_factory=list)
    lands: float = 0.0
    error: str | None = None
    missing: set[int] = field(init=False)  # members that have not posted yet

    def __post_init__(self) -> None:
        self.missing = set(self.members)

    def post(self, rank: int, post: Post) -> None:
        self.posts[rank] = post
        self.missing.discard(rank)

    def resolve(self, src: int, traffic: Traffic, *, queue: bool) -> None:
        """Work out the results once all members have posted."""
        posts = [self.posts[rank] for rank in self.members]
        first, texts = posts[0], [str(post) for post in posts]
        for rank, text in zip(self.members, texts, strict=True):
            if text != texts[0]:
                self.error = f"Workers disagree: rank {self.members[0]} sends {texts[0]}, rank {rank} {text}."
                return
        with torch.no_grad():
            self.results = first.kind.results([post.tensors for post in posts], src, range(len(posts)))
        ready = max(post.when for post in posts)
        given = nbytes(first.tensors)
        self.lands = traffic.carry(first.kind.name, self.members, given, ready, queue=queue)


@dataclass
class Condition:
    """A wait for a condition, with an optional deadline."""

    ready: Callable[[], bool]
    what: str
    deadline: float | None
    since: float | None = None  # when it was first seen to hold

    @property
    def due(self) -> float | None:
        return self.deadline if self.since is None else self.since
