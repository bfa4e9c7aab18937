"""The memory through which a worker and its sidecar pass tensors to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.comm.background import Sidecar


def sync_device(packed: Packed) -> None:
    """Wait for queued device work: the other thread may use another stream."""
    for device in {flat.device for flat in packed.flats}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


class Handover:
    """Four copies of the tensors: two that the worker sends from, two that the sidecar receives into.

    Each pair is a double buffer, so one copy can be written while the other is read. The worker calls
    `publish` and `fetch`, and the sidecar calls `bring`, with the sidecar's lock held; the other calls take
    the lock themselves. Subclasses say how unsent and received tensors are combined.
    """

    def __init__(self, tensors: Mapping[str, Tensor], version: int, sidecar: Sidecar) -> None:
        self.device = next(iter(tensors.values())).device
        self.version = version  # the round of the worker's newest contribution
        self._sidecar = sidecar
        self._draft, self._published, self._result, self._spare = (Packed.like(tensors) for _ in range(4))
        self._reading: Packed | None = None  # the result that the worker is reading

    def write(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, before `publish`: these are the tensors after its step."""
        raise NotImplementedError

    def reset(self, tensors: Sequence[Tensor]) -> None:
        """In the worker, instead of `write`: all workers have these tensors, as after a global round."""
        self.write(tensors)

    def publish(self) -> None:
        """In the worker, which then sets `version`: what it wrote is its newest contribution."""
        raise NotImplementedError

    def take(self) -> tuple[Packed, int]:
        """In the sidecar: the tensors to send, and the round the worker made them for."""
        raise NotImplementedError

    def bring(self, mean: Packed) -> None:
        """In the sidecar: the mean becomes the newest result."""
        self._result, self._spare = mean, self._result

    def fetch(self) -> None:
        """In the worker: it is about to read the newest result."""
        self._reading = self._result

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        """In the worker, after `fetch`: combine its tensors with the result of `workers` contributions.

        `late`: its own contribution was an older one. A result that it has used before counts one worker.
        """
        raise NotImplementedError

    def _await_reader(self) -> None:
        """In the sidecar, locked: the worker may still be reading the copy that is due for reuse."""
        self._sidecar.until(lambda: self._reading is not self._spare, "a result to be read")


class JoinMean(Handover):
    """Sends the newest snapshot of the weights. A late worker joins the mean as one extra member."""

    def write(self, tensors: Sequence[Tensor]) -> None:
        self._draft.read(tensors)
        sync_device(self._draft)

    def publish(self) -> None:
        self._draft, self._published = self._published, self._draft

    def take(self) -> tuple[Packed, int]:
        with self._sidecar.locked():
            self._await_reader()
            torch._foreach_copy_(self._spare.flats, self._published.flats)
            sync_device(self._spare)
            return self._spare, self.version

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        mean = self._reading
        assert mean is not None
        if workers > 1 and not late:
            mean.write(tensors)
        elif workers > 1:
            for x, m in zip(tensors, mean.views, strict=True):
                x.copy_((workers * m + x) / (workers + 1))
        sync_device(mean)  # the next round may overwrite it
        with self._sidecar.locked():
            self._reading = None


class AddSteps(Handover):
    """Keeps the worker's weights in the sidecar and adds each step to them, however late it comes.

    A round replaces the kept weights by the group's mean. The sum over all workers therefore never changes
    in a round, and each step enters it exactly once. The kept weights are `_result`; `_published` holds the
    steps that are not in them yet; `_draft` holds the start of the current step, and then the step itself.
    """

    _written = _unsent = False  # whether `_draft`, and `_published`, hold a step

    def reset(self, tensors: Sequence[Tensor]) -> None:
        """The sidecar runs no round meanwhile."""
        self._unsent = False
        for packed in (self._result, self._draft):
            packed.read(tensors)
            sync_device(packed)

    def write(self, tensors: Sequence[Tensor]) -> None:
        for start, now in zip(self._draft.views, tensors, strict=True):
            torch.sub(now.to(start.dtype), start, out=start)
        sync_device(self._draft)
        self._written = True

    def publish(self) -> None:
        if self._written and self._unsent:
            torch._foreach_add_(self._published.flats, self._draft.flats)
            sync_device(self._published)
        elif self._written:
            self._published, self._draft, self._unsent = self._draft, self._published, True
        self._written = False

    def take(self) -> tuple[Packed, int]:
        with self._sidecar.locked():
            self._await_reader()
            torch._foreach_copy_(self._spare.flats, self._result.flats)
            if self._unsent:
                torch._foreach_add_(self._spare.flats, self._published.flats)
            sync_device(self._spare)
            self._unsent = False
            return self._spare, self.version

    def fetch(self) -> None:
        super().fetch()
        if self._unsent:
            torch._foreach_copy_(self._draft.flats, self._published.flats)
        else:
            torch._foreach_zero_(self._draft.flats)

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        assert self._reading is not None
        torch._foreach_add_(self._draft.flats, self._reading.flats)
        self._draft.write(tensors)
        sync_device(self._draft)  # the next round may overwrite what was read
        with self._sidecar.locked():
            self._reading = None


class SumGradients(Handover):
    """Unsent gradients add up for the sidecar, received means for the worker. Each is used once."""

    def write(self, tensors: Sequence[Tensor]) -> None:
        self._written = list(tensors)  # `publish` adds them, since the sidecar may empty the draft meanwhile

    def publish(self) -> None:
        torch._foreach_add_(self._draft.views, self._written)
        sync_device(self._draft)
        self._written = []

    def take(self) -> tuple[Packed, int]:
        with self._sidecar.locked():
            self._draft, self._published = self._published, self._draft
            torch._foreach_zero_(self._draft.flats)
            return self._published, self.version

    def bring(self, mean: Packed) -> None:
        torch._foreach_add_(self._result.flats, mean.flats)
        sync_device(self._result)

    def fetch(self) -> None:
        self._result, self._spare = self._spare, self._result
        torch._foreach_zero_(self._result.flats)

    def merge(self, tensors: Sequence[Tensor], workers: int, late: bool) -> None:
        self._spare.write(tensors)
