"""Reducers inside torch's own DistributedDataParallel."""

# No `from __future__ import annotations` here: torch looks at the annotations of hooks.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.base.clock import Clock, State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.packed import Packed
from offbeat.base.tensors import clean_names
from offbeat.comm.communicator import Communicator, Metered
from offbeat.comm.presence import Departure
from offbeat.comm.torch_backend import Torch
from offbeat.engine.agreement import compare_lines, copy_state
from offbeat.reduce import Mean, Reducer

_Bucket = tuple[dict[str, Tensor], Tensor, torch.futures.Future[Tensor]]
"""The gradients of a bucket by name, the buffer in which they lie, and the future that DDP waits for."""


def ddp_hook(
    reducer: Reducer, *, model: nn.Module | None = None, group: dist.ProcessGroup | Communicator | None = None
) -> "Hook":
    """Any reducer as a communication hook of DistributedDataParallel, overlapped with the backward pass.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, offbeat.ddp_hook(ErrorFeedback(Quantized(4))))

    A background thread sends the buckets on connections of its own, over gloo too. The first backward pass of
    a run is averaged exactly, because DDP rearranges its buckets after it. `group` is that of the DDP model.
    With `model`, errors name its parameters instead of numbering them. All ranks call this.
    """
    return Hook(reducer, model, group)


class Hook:
    """The hook that `ddp_hook` returns. `sent` and `received` count its bytes."""

    def __init__(
        self, reducer: Reducer, model: nn.Module | None, group: dist.ProcessGroup | Communicator | None
    ) -> None:
        if not isinstance(reducer, Reducer):
            raise TypeError(f"ddp_hook({reducer!r}): pass a reducer, such as Quantized(8).")
        self.reducer = reducer.for_gradients()
        self.error: Exception | None = None
        self.__name__ = self.__qualname__ = repr(self)  # torch looks at them
        # Never the communicator of a synchronizer: two threads on one would mix their messages.
        self._comm = Metered(group if isinstance(group, Communicator) else Torch(group))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat")
        self._step = self._before = 0  # steps made here, and before the checkpoint that was loaded
        self._saved: dict[str, State] = {}  # states from the checkpoint, until their buckets come
        self._buckets: dict[str, tuple[Packed, State]] = {}  # memory and state, by the names of the gradients
        self._held: list[_Bucket] = []  # of a first pass, whose buckets differ from the checkpoint's
        known = {} if model is None else clean_names(model.named_parameters())
        self._parameters = {id(p): (name, p) for name, p in known.items()}
        compare_lines([f"the hook {self!r}"], self._comm)

    def __repr__(self) -> str:
        return f"ddp_hook({self.reducer!r})"

    @property
    def sent(self) -> int:
        return self._comm.sent

    @property
    def received(self) -> int:
        return self._comm.received

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # the thread works on a stream of its own
        devices = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        for p in parameters:  # numbered in the order in which they first appear, the same in every run
            self._parameters.setdefault(id(p), (str(len(self._parameters)), p))
        names = [self._parameters[id(p)][0] for p in parameters]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        self._thread.submit(self._receive, (gradients, buffer, future), self._step, bucket.is_last())
        self._step += bucket.is_last()
        return future

    def state_dict(self) -> State:
        """Return the state of the code on this rank. Call it between two steps."""
        states = copy_state({**self._saved, **{key: state for key, (_, state) in self._buckets.items()}})
        return {**self._origin(), "step": self._before + self._step, "states": states}

    def load_state_dict(self, state: State) -> None:
        """Continue from a checkpoint, to the bit if it was saved after at least two steps.

        Call it before or between steps. A process sends its first pass as a whole, in the saved buckets.
        """
        ours = self._origin()
        saved = {"workers": self._comm.size, **state}  # old checkpoints do not say how many
        if any(saved[key] != ours[key] for key in ours):
            sentence = "{hook} on rank {rank} of {workers} workers"
            raise CheckpointMismatch(
                f"The checkpoint is of {sentence.format(**saved)}, this is {sentence.format(**ours)}."
            )
        self._saved, self._buckets = copy_state(state["states"]), {}
        self._before = state["step"] - self._step

    def _origin(self) -> State:
        return {"hook": repr(self), "rank": self._comm.rank, "workers": self._comm.size}

    @torch.no_grad()
    def _receive(self, bucket: _Bucket, step: int, last: bool) -> None:
        """In the thread: average a bucket and complete its future. After loading, collect a pass first."""
        self._held.append(bucket)
        resuming = step == 0 and bool(self._saved)
        if resuming and not last:
            return
        held, self._held = self._held, []
        try:
            if self.error is not None:
                raise self.error
            for gradients in self._restore_layout(held) if resuming else [bucket[0]]:
                self._reduce(gradients, step, coded=resuming or step > 0)
        except Exception as error:
            if self.error is None:
                self._comm.worker.leave(Departure.of(error))
            self.error = error
            for _, _, future in held:
                future.set_exception(error)  # type: ignore[arg-type]
        else:
            for _, buffer, future in held:
                future.set_result(buffer)

    def _restore_layout(self, held: Sequence[_Bucket]) -> list[dict[str, Tensor]]:
        """Return the gradients of a whole pass in the buckets of the checkpoint."""
        found = {name: gradient for gradients, _, _ in held for name, gradient in gradients.items()}
        layout = [key.split(" ") for key in self._saved]
        if sorted(name for names in layout for name in names) != sorted(found):
            raise CheckpointMismatch(f"The checkpoint of {self!r} is of a model with other parameters.")
        return [{name: found[name] for name in names} for names in layout]

    def _reduce(self, gradients: dict[str, Tensor], step: int, *, coded: bool) -> None:
        """Average a bucket in place. A new bucket replaces the others that held its gradients."""
        key = " ".join(gradients)
        if coded and key not in self._buckets:
            state = self._saved.pop(key) if key in self._saved else self.reducer.init()
            for kept in (self._buckets, self._saved):
                for other in [other for other in kept if gradients.keys() & set(other.split(" "))]:
                    del kept[other]
            self._buckets[key] = Packed.like(gradients), state
        room, state = self._buckets[key] if coded else (Packed.like(gradients), {})
        reducer = self.reducer if coded else Mean()
        room.read(list(gradients.values()))
        clock = Clock(step=self._before + step, round=self._before + step, lr=0.0)
        reducer.start(room, self._comm, clock, state).wait().write(list(gradients.values()))
