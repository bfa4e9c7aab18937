"""Gradients that are sent in buckets, each as soon as the backward pass has completed it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from offbeat.among import Peers, World
from offbeat.base.clock import Clock, State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.packed import Packed
from offbeat.base.tensors import Gradients, Share, local, read_version
from offbeat.comm.communicator import Communicator, Metered, Pending, join_messages
from offbeat.engine.agreement import copy_state
from offbeat.engine.extras import Payload
from offbeat.engine.pipeline import Pipeline
from offbeat.engine.report import logger
from offbeat.engine.round import Delay, Rhythm, Round
from offbeat.engine.sender import PendingHeaders, Sender
from offbeat.engine.weights import AGAIN, NO_WEIGHT, SHARE, read_words
from offbeat.reduce import Mean, Reducer
from offbeat.update.update import Replace, Update

# A bucket is the model divided by one of these, within some bytes. The messages of a code are much shorter.
_EXACT_PARTS, _CODED_PARTS = 2, 8
_LEAST, _MOST = 2**18, 25 * 2**20


def choose_sender(payload: Payload, update: Update, reduce: Reducer, delay: Delay, peers: Peers) -> Sender:
    """Return `Buckets` for gradients among all workers, if there is more than one; otherwise `Sender`."""
    sizes = [tensor.nbytes for tensor in payload.live.like().values()]
    all_gradients = isinstance(payload.live, Gradients) and isinstance(peers, World)
    if all_gradients and reduce.splits and len(cut_sizes(sizes, reduce)) > 1:
        return Buckets(payload, update, reduce, sizes, early=delay == 0)
    return Sender(payload, update, reduce)


class Buckets(Sender):
    """Sends gradients in buckets, in the same order on all ranks.

    A bucket is sent during the backward pass, once all before it are sent and each of its gradients has grown
    as often as in the last step in which it grew. The rest are sent at the step. Each has its own part of the
    reducer's state, so the mean does not depend on when it was sent. If a gradient changes after its bucket
    was sent, on any rank, all ranks send all buckets again. After the nth time, the next 2ⁿ⁻¹ rounds send
    all buckets at the step.
    """

    def __init__(
        self, payload: Payload, update: Update, reduce: Reducer, sizes: Sequence[int], *, early: bool
    ) -> None:
        super().__init__(payload, update, reduce)
        self._parameters, self._lengths = payload.live.parameters, cut_sizes(sizes, reduce)
        self._early = early and isinstance(update, Replace)
        self._edges = [0, *accumulate(self._lengths)]  # of the buckets, in gradients
        self._bucket_of = [b for b, n in enumerate(self._lengths) for _ in range(n)]
        done = list(accumulate(sizes, initial=0))
        # The forward pass takes a third of the time of a gradient.
        self._shares = [(1 + 2 * done[edge] / max(1, done[-1])) / 3 for edge in self._edges[1:]]
        self._lock = threading.Lock()  # one thread per device runs the backward pass
        self._grown, self._usual = [0] * len(sizes), [0] * len(sizes)  # how often each grew, now and usually
        self._missing = list[int]()  # the number of gradients that each bucket waits for
        self._comm: Metered | None = None  # of exact means
        self._pipeline: Pipeline | None = None  # of codes
        self._error: Exception | None = None
        self._weighed, self._warned, self._times, self._pause = False, False, 0, 0
        self._forget()

    def _forget(self) -> None:
        """No bucket has been sent, and none may be sent early."""
        self._clock: Clock | None = None  # of the coming round, if its buckets may be sent early
        self._began: float | None = None  # when the first one was sent early
        self._in_flight = list[Pending[Any]]()
        if self._pipeline is not None:
            self._pipeline.forget()
        self._left = list[tuple[Tensor | None, Any]]()  # gradients that were sent early, and their versions
        self._grew_late = False  # whether one of them has grown since
        self._kept = list[State]()  # states of the buckets that were sent, as they were before

    def init(self) -> State:
        return {"lengths": self._lengths, "parts": [self.reduce.init() for _ in self._lengths]}

    @cached_property
    def parts(self) -> Sequence[Packed]:  # type: ignore[override]
        """The buckets; extras are in the last. First used in a round: until then the model may be moved."""
        return self.payload.packed.cut(*self._lengths[:-1])

    def connect(self, everyone: Communicator) -> Metered:
        if self._comm is None and self._pipeline is None:
            worker, self._everyone, self._outside = everyone.worker, everyone, Metered(everyone)
            if self.reduce == Mean():
                self._comm = Metered(worker.duplicate())  # the backward pass sends, in an order of its own
            else:
                self._pipeline = Pipeline(self.reduce, worker)
            call = partial(_call, weakref.ref(self))
            hooks = [
                p.register_post_accumulate_grad_hook(partial(call, i))  # type: ignore[no-untyped-call]
                for i, p in enumerate(self._parameters)
                if self._early
            ]
            self._remove_hooks = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        return self._outside

    def prepare_next(self, clock: Clock, rhythm: Rhythm, states: dict[str, State]) -> None:
        """Let the buckets of the next step be sent early, if it is certain to have a round."""
        self._forget()
        if self._pause:
            self._pause -= 1
        elif self._early and not self._weighed and clock.workers > 1 and rhythm.is_certain(clock.step + 1):
            self._clock, self._states = Clock(clock.step + 1, rhythm.round, 0.0), states
            self._missing = [sum(n > 0 for n in self._usual[a:b]) for a, b in pairwise(self._edges)]

    def grew(self, i: int) -> None:
        """The backward pass has added to gradient i."""
        with self._lock:
            self._grew_late |= self._bucket_of[i] < len(self._in_flight)
            if self.held:
                return
            self._grown[i] += 1
            if self._clock is not None and self._error is None and self._grown[i] == self._usual[i]:
                self._missing[self._bucket_of[i]] -= 1
                try:
                    if not self._missing[self._bucket_of[i]]:
                        self._send_complete(self._clock)
                except Exception as error:  # raised by the step, which tells the other workers
                    self._error = error

    @torch.no_grad()
    def _send_complete(self, clock: Clock) -> None:
        while (b := len(self._in_flight)) < len(self.parts) - 1 and self._missing[b] == 0:
            own = [p.grad for p in self._parameters[self._edges[b] : self._edges[b + 1]]]
            if any(grad is not None and grad.layout != torch.strided for grad in own):
                return  # the step refuses it
            self._everyone.worker.computed(clock.step - 1, self._shares[b])
            self._began = self._everyone.now() if self._began is None else self._began
            for grad, view in zip(own, self.parts[b].views, strict=True):
                view.zero_() if grad is None else view.copy_(local(grad))
            self._left += [(grad, read_version(grad)) for grad in own]
            self._send(b, clock, self._states)

    def check_unchanged(self, round: Round, weight: float) -> float:
        self._usual = [new or old for new, old in zip(self._grown, self._usual, strict=True)]
        self._grown = [0] * len(self._grown)
        self._weighed = weight >= 0  # the weight was not known when the buckets were sent
        round.began = round.began if self._began is None else self._began
        if weight <= SHARE and self._left:
            raise RuntimeError("join(): no step has used the last backward pass: call step() first.")
        left = zip(self._parameters, self._left, strict=False)
        changed = any(p.grad is not grad or read_version(grad) != before for p, (grad, before) in left)
        return AGAIN if (changed or self._grew_late) and weight == NO_WEIGHT else weight

    def start(
        self, round: Round, share: Share, factor: float, heads: PendingHeaders, states: dict[str, State]
    ) -> Pending[Packed]:
        notes, live = share
        # This worker has waited for all weights. A dry one may not know that others have some.
        if factor != 1:
            self._weighed = max(read_words(heads.wait())) >= 0
        if self._clock is not None:  # some may have been sent early, here or elsewhere
            self.payload.packed.cut(len(live))[1].scale(factor)
            mean = self._send_rest(round, live, states)
            if not self._has_changed(round, heads):
                return mean
            self._recall(states)
            self.payload.pack_extras(notes)
        if isinstance(self.update, Replace) and factor == 1:
            return self._send_rest(round, live, states)
        self.pack(round, share, factor, states)
        return self._send_rest(round, None, states)

    def _has_changed(self, round: Round, heads: PendingHeaders) -> bool:
        """Wait for all workers' headers. Return whether all buckets must be sent again."""
        with round.waiting():
            weights = read_words(heads.wait())
        if max(weights) < 0 and AGAIN not in weights:
            return False
        self._times, self._pause = self._times + 1, 2**self._times
        if AGAIN in weights and not self._warned:
            self._warned = True
            logger.warning(
                "Gradients changed after they were sent, so they were sent twice. Wrap all backward passes "
                "of a step but the last in sync.accumulate(), and change gradients only in sync.step(...)."
            )
        return True

    def _recall(self, states: dict[str, State]) -> None:
        """Drop the means of all buckets, which every rank has sent, and restore the states."""
        join_messages(self._in_flight).wait()
        if self._kept:
            states["reduce"]["parts"] = self._kept
        self._forget()

    def _send_rest(
        self, round: Round, live: Sequence[Tensor] | None, states: dict[str, State]
    ) -> Pending[Packed]:
        """Send all buckets that are not sent yet, after packing the live tensors, if given."""
        if self._error is not None:
            raise self._error
        for b in range(len(self._in_flight), len(self.parts)):
            if live is not None:
                own = live[self._edges[b] : self._edges[b + 1]]
                self.parts[b].cut(len(own))[0].read(own)
            self._send(b, round.clock, states)
        return join_messages(list(self._in_flight)).then(lambda _: self._unpack(round))

    def _unpack(self, round: Round) -> Packed:
        """Return the means of all buckets, which have arrived."""
        if self._pipeline is not None and self._pipeline.refused is not None:
            raise self._pipeline.refused
        self._move_bytes(round.comm)
        return self.payload.packed.scaled(1 / round.comm.size if self._pipeline is None else 1.0)

    def _move_bytes(self, to: Metered) -> None:
        if self._pipeline is not None:
            self._pipeline.move_bytes(to)
        elif self._comm is not None:
            self._comm.move(to)

    def _send(self, b: int, clock: Clock, states: dict[str, State]) -> None:
        part, memory = self.parts[b], states["reduce"]["parts"][b]
        if self._pipeline is None:
            assert self._comm is not None
            self._in_flight.append(self._comm.total(part.flats))
            return
        if self._clock is not None:
            self._kept.append(copy_state(memory))
        last = b == len(self.parts) - 1
        self._in_flight.append(self._pipeline.send(part, clock, memory, last=last))

    def rewind(self, states: dict[str, State]) -> dict[str, State]:
        """Return the states as they were before any bucket was sent early."""
        own = states["reduce"]
        return {**states, "reduce": {**own, "parts": [*self._kept, *own["parts"][len(self._kept) :]]}}

    def check(self, states: dict[str, State]) -> None:
        if states["reduce"].get("lengths") != self._lengths:
            raise CheckpointMismatch(
                "The checkpoint has other buckets of gradients than this run: its model has other sizes, or "
                "another version of Offbeat saved it."
            )

    def drain(self, states: dict[str, State]) -> None:
        """If any rank has sent a bucket, send what other ranks wait for. Drop the means."""
        if self._clock is not None and (self._comm is not None or self._pipeline is not None):
            if any(words[0] for words in self._outside.tell([len(self._in_flight)]).wait()):
                self._send_rest(Round(self._clock, self._outside, since=0), None, states)
                self._recall(states)
                self._move_bytes(self._outside)  # the bytes go into the totals
            self._forget()

    def close(self, *, wait: bool) -> None:
        """Remove the hooks, and end the threads."""
        if self._comm is not None or self._pipeline is not None:
            self._remove_hooks()
        if self._pipeline is not None:
            self._pipeline.close(wait=wait)


def _call(buckets: weakref.ref[Buckets], i: int, parameter: Tensor) -> None:
    if (alive := buckets()) is not None:
        alive.grew(i)


def cut_sizes(sizes: Sequence[int], reduce: Reducer) -> list[int]:
    """Return the number of tensors in each bucket. The first is small, because nothing is sent before it."""
    usual = min(max(sum(sizes) // (_EXACT_PARTS if reduce == Mean() else _CODED_PARTS), _LEAST), _MOST)
    lengths, filled = [0], 0
    for size in sizes:
        if filled >= (usual if len(lengths) > 1 else usual // 4):
            lengths, filled = [*lengths, 0], 0
        lengths[-1] += 1
        filled += size
    return lengths
