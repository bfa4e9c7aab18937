"""Weights averaged in groups, every step, without waiting for the late (WAGMA-SGD)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.companion import Companion
from offbeat.peers import Butterfly
from offbeat.reduce import Reducer
from offbeat.riders import BufferRule, Buffers
from offbeat.schedule import Clock, State
from offbeat.tensors import Live, Packed
from offbeat.waitfree.part import Among, Waitfree
from offbeat.waitfree.snapshots import Snapshots


class GroupAverage(Waitfree):
    """After every step but each `every`-th the weights are averaged in a group of workers.

    Whoever comes first calls all the others; a worker that is not there contributes, through its companion,
    the weights it had last:

        x ← sum/S              if these very weights are in the sum
        x ← (sum + x)/(S+1)    late: older ones are; each sum is used once, after which x stays as it is

    The global rounds, after each `every`-th step, are an `Exchange` before it in the list: there all meet, so
    a contribution is at most every − 1 rounds old. Floating buffers go with the weights where `buffers` are
    averaged. Arguments beyond those are described in `Waitfree`.

        [Exchange(params(model), when=Every(10)), GroupAverage(params(model), every=10, among=Butterfly())]
    """

    def __init__(
        self,
        live: Live,
        *,
        every: int,
        among: Among | None = None,
        reduce: Reducer | None = None,
        grace: float | None = None,
        buffers: BufferRule = "average",
    ) -> None:
        peers = Butterfly() if among is None else among
        super().__init__(live, every=every, among=peers, grace=grace, reduce=reduce)
        self._buffers = Buffers(live.model, buffers)
        self._snapshots: Snapshots | None = None
        self._resumed_with: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"GroupAverage({self.live!r}, every={self.every}, among={self.among!r}, reduce={self.reduce!r}, "
            f"grace={self.grace}, buffers={self._buffers.rule!r})"
        )

    @property
    def active(self) -> bool:
        """Not where all groups are of one worker, nor where all rounds are global."""
        size = self.among.size if isinstance(self.among, Butterfly) else self.among.everyone.size
        return size > 1 and self.every > 1

    @torch.no_grad()
    def load(self, first: int, companion: Companion) -> Snapshots:
        # The first forward pass has already moved the buffers: a resumed run knows what they were before it.
        buffers = {f"+{name}": b for name, b in {**self._buffers.averaged(), **self._resumed_with}.items()}
        self._snapshots = Snapshots({**self.live.like(), **buffers}, first - 1, companion)
        self._resumed_with = {}
        return self._snapshots

    def _tensors(self) -> list[Tensor]:
        return [*self.live.tensors(), *self._buffers.averaged().values()]

    @torch.no_grad()
    def after(self, clock: Clock) -> None:
        if not self.active:
            return
        assert self._snapshots is not None
        round, snapshots, tensors = clock.step - 1, self._snapshots, self._tensors()
        snapshots.write(tensors)
        apart = not self.blocking(round)
        self.submit(round, lambda: snapshots.publish(round), call=apart, timed=apart)
        if not apart:
            self.call_the_roll()
        else:
            outcome, kind = self.await_round(round)
            if outcome.mean is not None and kind != "nothing new":
                merge(tensors, outcome.mean, outcome.workers, late=kind == "late")
            snapshots.release()
        self.resume()

    def state_dict(self) -> State:
        buffers = {name: buffer.clone() for name, buffer in self._buffers.averaged().items()}
        return {**super().state_dict(), "buffers": buffers}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._resumed_with = dict(state["buffers"])


def merge(tensors: Sequence[Tensor], mean: Packed, workers: int, *, late: bool) -> None:
    """The mean of a group of so many; who is late comes to it as one worker more."""
    if not late:
        mean.write(tensors)
        return
    for x, m in zip(tensors, mean.views, strict=True):
        x.copy_((workers * m + x) / (workers + 1))
