"""Gradient coding: the exact mean of all gradients, without those of late workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from offbeat.among import World
from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.errors import BadArgument
from offbeat.base.tensors import Gradients
from offbeat.comm.background import Sidecar
from offbeat.waitfree.answers import Answers, Decoded
from offbeat.waitfree.base import Waitfree
from offbeat.waitfree.clusters import Clusters
from offbeat.waitfree.rounds import GroupReport
from offbeat.waitfree.wait_rules import Enough, WaitRule


@dataclass(frozen=True)
class CodedReport(GroupReport):
    """A round of coded gradients. It is "late" if it was decided before this worker had answered."""

    answered: tuple[int, ...]  # the ranks that had answered by then
    slow: tuple[int, ...]  # ranks that were late: much later than the others


class CodedGradients(Waitfree):
    """Replaces the gradients by the mean over all parts of the data, from the first answers that decode.

    Every worker computes the gradients of `stragglers` + 1 parts and answers with one vector; `Clusters` says
    which parts and coefficients. A round ends once all but `stragglers` workers of every cluster have
    answered, and `grace` seconds later at the latest. An answer that comes later is dropped. Every worker
    applies the results of all rounds, in order, so all make the same steps and stay equal to the bit. A
    worker may be `behind` rounds behind; then the others wait for it. With `dynamic`, clusters are formed
    again after each round, so that late workers are spread evenly.

        part = CodedGradients(grads(model), stragglers=1)
        sync = Synchronizer(optimizer, [part])
    """

    sidecars = True

    def __init__(
        self,
        live: Gradients,
        *,
        stragglers: int = 1,
        clusters: int | None = None,
        dynamic: bool = False,
        grace: float = 0.0,
        behind: int = 16,
        among: World | None = None,
    ) -> None:
        if not is_whole(behind, 1):
            raise BadArgument("behind", behind, "behind must be a whole number of rounds, at least 1.")
        if not isinstance(dynamic, bool):
            raise BadArgument("dynamic", dynamic, "dynamic must be True or False.")
        if grace is None or not 0 <= grace < inf:
            raise BadArgument("grace", grace, "grace must be a number of seconds, at least 0.")
        super().__init__(live, every=1, among=World() if among is None else among, grace=grace)
        self.clusters = Clusters.form(self.outside.size, stragglers, clusters)  # of the coming step
        self._call = f"stragglers={stragglers}, clusters={clusters}, dynamic={dynamic}"
        self.dynamic, self.behind, self.load = dynamic, behind, self.clusters.stragglers + 1
        self.unfinished = 0  # parts of the coming step that a sampler has not handed out yet

    def __repr__(self) -> str:
        return f"CodedGradients({self.live!r}, {self._call}, grace={self.grace}, behind={self.behind})"

    def wait_rules(self) -> tuple[WaitRule, WaitRule]:
        assert self.grace is not None
        return Enough(self.grace), Enough(self.grace)

    def open_handover(self, version: int, sidecar: Sidecar) -> None:
        notes = {f"+{name}": note for name, note in self.live.notes().items()}
        tensors = {**self.live.like(), **notes}
        self.handover: Answers = Answers(
            tensors, version, sidecar, self.clusters, dynamic=self.dynamic, behind=self.behind
        )

    def is_over(self, step: int) -> bool:
        """Whether the round of a step is over, so that an answer would be dropped."""
        if self._rounds is None:
            return False
        with self._rounds.sidecar.locked():
            return self._rounds.done >= step

    def hand_out(self, step: int) -> Iterator[tuple[int, float]]:
        """Yield the numbers and coefficients of this worker's parts, until the round is over."""
        worker, parts = self.peers.everyone.worker, self.clusters.parts(self.peers.everyone.rank)
        self.unfinished = len(parts)
        for done, part in enumerate(parts):
            if done:
                worker.computed(step, done / len(parts))
            if self.is_over(step):
                worker.skip()
                return
            yield part
            self.unfinished -= 1

    @torch.no_grad()
    def before(self, clock: Clock) -> bool:
        if self.active:
            (present,) = self.live.notes().values()
            tensors = [*self.live.tensors(), present]
            if not self.unfinished:
                self.submit(clock.step, tensors)
            elif not self.is_over(clock.step):
                raise RuntimeError(
                    f"step(): {self.unfinished} of this step's {self.load} parts are left: go through all "
                    "parts that the sampler hands out before every step."
                )
            self._land(clock.step, tensors)
            self.live.land_notes([present])
        self.unfinished = 0
        return True

    def submit(self, round: int, tensors: Sequence[Tensor]) -> None:
        assert self._rounds is not None
        sidecar = self._rounds.sidecar
        self.handover.write(tensors)
        with sidecar.locked():
            self.handover.version = round
            # A late answer is dropped, but tells rank 0 that this worker is not far behind.
            if sidecar.comm.rank:
                sidecar.announce(round, to=0)

    def _land(self, round: int, tensors: Sequence[Tensor]) -> None:
        """Wait for the result of a round, and put it in place of the gradients."""
        rounds, now = self._rounds, self.peers.everyone.now
        assert rounds is not None
        began = now()
        with rounds.sidecar.locked():
            rounds.sidecar.until(lambda: rounds.done >= round, f"round {round}")
            result: Decoded = self.handover.results.popleft()
            fields = vars(rounds.news.pop(0))
        (answered, late), self.clusters = result.verdict, result.clusters
        fields |= {"seconds_waited": now() - began, "step": round + 1}
        fields["kind"] = "fresh" if rounds.sidecar.comm.rank in answered else "late"
        self._emit(CodedReport(**fields, answered=tuple(sorted(answered)), slow=tuple(sorted(late))))
        self.handover.land(result, tensors)

    def after(self, clock: Clock) -> None:
        pass

    def state_dict(self) -> State:
        return {"seats": torch.tensor([rank for ranks in self.clusters.ranks for rank in ranks])}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({"durations": []})
        self.clusters = self.clusters.seat(state["seats"].tolist())
