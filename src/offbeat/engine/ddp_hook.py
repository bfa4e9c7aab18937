"""Reducers inside torch's own DistributedDataParallel."""

# No `from __future__ import annotations` here: torch looks at the annotations of hooks.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.base.clock import Clock, State
from offbeat.base.errors import CheckpointMismatch
from offbeat.base.packed import Packed
from offbeat.base.tensors import named
from offbeat.comm.communicator import Communicator, Metered
from offbeat.comm.presence import Departure
from offbeat.comm.torch_backend import Torch
from offbeat.engine.checkpoint import copied
from offbeat.engine.handshake import compare_lines
from offbeat.reduce import Mean, Reducer


def ddp_hook(
    reducer: Reducer,
    *,
    model: nn.Module | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
) -> "Hook":
    """Any reducer as a communication hook of DistributedDataParallel: codes overlap with backward.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, offbeat.ddp_hook(ErrorFeedback(Quantized(4))))

    A thread of its own sends bucket after bucket, on connections of Offbeat's own, over gloo too. The first
    backward pass of a run is averaged exactly, since DDP rearranges its buckets after it. `group` is that
    of the DDP model; with `model` errors name its parameters, not their numbers. All ranks call this.
    """
    return Hook(reducer, model, group)


class Hook:
    """What `ddp_hook` returns; `sent` and `received` count its bytes, `state_dict` holds what codes keep."""

    def __init__(
        self, reducer: Reducer, model: nn.Module | None, group: dist.ProcessGroup | Communicator | None
    ) -> None:
        if not isinstance(reducer, Reducer):
            raise TypeError(f"ddp_hook({reducer!r}): a reducer is needed, such as Quantized(8).")
        self.reducer = reducer
        self.error: Exception | None = None
        self.__name__ = self.__qualname__ = repr(self)  # torch looks at them
        # Never the communicator of a synchronizer: two threads on one would mix their messages.
        self._comm = Metered(group if isinstance(group, Communicator) else Torch(group))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat")
        self._saved: dict[str, State] = {}
        self._before = 0  # steps of the run this one goes on from
        known = {} if model is None else named(model.named_parameters())
        self._parameters = {id(p): (name, p) for name, p in known.items()}
        self._buckets: dict[str, tuple[Packed, State]] = {}
        self._held: list[_Message] = []  # of a first pass, whose buckets are not those of before
        self._step = 0
        compare_lines([f"the hook {self!r}"], self._comm)

    def __repr__(self) -> str:
        return f"ddp_hook({self.reducer!r})"

    @property
    def sent(self) -> int:
        return self._comm.sent

    @property
    def received(self) -> int:
        return self._comm.received

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # the thread works on a stream of its own
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        gradients = self._named(bucket.parameters(), bucket.gradients())
        message = _Message(gradients, buffer, future)
        self._thread.submit(self._receive, message, self._step, bucket.is_last())
        if bucket.is_last():
            self._step += 1
        return future

    def state_dict(self) -> State:
        """What the code remembers, per rank; to be asked between two steps."""
        states = copied({**self._saved, **{key: state for key, (_, state) in self._buckets.items()}})
        step = self._before + self._step
        return {"hook": repr(self), "rank": self._comm.rank, "step": step, "states": states}

    def load_state_dict(self, state: State) -> None:
        """Go on from there, to the bit if at least two steps had been made: between two steps, or before all.

        The first backward pass of a process is then sent when it is complete, in the buckets of before.
        """
        if (state["hook"], state["rank"]) != (repr(self), self._comm.rank):
            raise CheckpointMismatch(
                f"The checkpoint is of {state['hook']} on rank {state['rank']}, "
                f"this is {self!r} on rank {self._comm.rank}."
            )
        self._saved, self._buckets = copied(state["states"]), {}
        self._before = state["step"] - self._step

    def _named(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """The gradients, named by when their parameters were first seen, which is the same in every run."""
        for parameter in parameters:
            self._parameters.setdefault(id(parameter), (str(len(self._parameters)), parameter))
        names = [self._parameters[id(parameter)][0] for parameter in parameters]
        return dict(zip(names, gradients, strict=True))

    @torch.no_grad()
    def _receive(self, message: "_Message", step: int, last: bool) -> None:
        """In the thread: average a bucket and hand it back, or all that were held, once they are complete."""
        self._held.append(message)
        again = step == 0 and bool(self._saved)
        if again and not last:
            return
        held, self._held = self._held, []
        try:
            if self.error is not None:
                raise self.error
            for gradients in self._layout(held) if again else [message.gradients]:
                self._reduce(gradients, step, coded=again or step > 0)
        except Exception as error:
            if self.error is None:
                self._comm.worker.leave(Departure.of(error))
            self.error = error
            for one in held:
                one.future.set_exception(error)  # type: ignore[arg-type]
        else:
            for one in held:
                one.future.set_result(one.buffer)

    def _layout(self, held: "Sequence[_Message]") -> list[dict[str, Tensor]]:
        """The gradients of a whole pass in the buckets of the checkpoint."""
        found = {name: gradient for one in held for name, gradient in one.gradients.items()}
        layout = [key.split(" ") for key in self._saved]
        if sorted(name for names in layout for name in names) != sorted(found):
            raise CheckpointMismatch(f"The checkpoint of {self!r} is of a model with other parameters.")
        return [{name: found[name] for name in names} for names in layout]

    def _reduce(self, gradients: dict[str, Tensor], step: int, *, coded: bool) -> None:
        room, state = self._bucket(gradients) if coded else (Packed.like(gradients), {})
        room.read(list(gradients.values()))
        clock = Clock(step=self._before + step, round=self._before + step, lr=0.0)
        reducer = self.reducer if coded else Mean()
        reducer.start(room, self._comm, clock, state).wait().write(list(gradients.values()))

    def _bucket(self, gradients: dict[str, Tensor]) -> tuple[Packed, State]:
        """Memory and state of a bucket, which are those of its gradients; others that had one go."""
        key = " ".join(gradients)
        if key not in self._buckets:
            state = self._saved.pop(key) if key in self._saved else self.reducer.init()
            for kept in (self._buckets, self._saved):
                for other in [other for other in kept if gradients.keys() & set(other.split(" "))]:
                    del kept[other]
            self._buckets[key] = Packed.like(gradients), state
        return self._buckets[key]


@dataclass(frozen=True)
class _Message:
    """A bucket: its gradients, which lie in its buffer, and who waits for it."""

    gradients: dict[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
