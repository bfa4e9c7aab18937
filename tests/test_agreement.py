"""Workers that do not do the same: one sentence, naming the rank, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import Clock, Communicator, Every, Exchange, Schedule, Synchronizer, params
from offbeat.engine.agreement import checksum

ODD = 2  # the rank that is different
Worker = Callable[[Communicator, bool], Any]


def told(worker: Worker, workers: int = 4, odd: int = ODD) -> str:
    """The one sentence every rank hears; `worker` is told whether it is the odd one."""

    def heard(comm: Communicator) -> str:
        with pytest.raises(offbeat.Disagreement) as caught:
            worker(comm, comm.rank == odd)
        return str(caught.value)

    sentences = offbeat.simulate(heard, workers)
    assert len(set(sentences)) == 1, sentences
    return sentences[0]


def net(width: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def sgd(model: nn.Module, lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


ADVICE = "Build the same model and method on every worker."


def test_another_method() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        build = offbeat.ddp if odd else offbeat.local_sgd
        build(model, sgd(model), group=comm)

    assert told(worker) == (
        f"Workers disagree: rank 0 has the method local_sgd(), rank 2 has the method ddp(). {ADVICE}"
    )


def test_another_argument() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        offbeat.local_sgd(model, sgd(model), every=5 if odd else 4, group=comm)

    assert told(worker) == (
        "Workers disagree: rank 0 has the method local_sgd(every=4), "
        f"rank 2 has the method local_sgd(every=5). {ADVICE}"
    )


def test_rank_0_is_the_measure() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        offbeat.local_sgd(model, sgd(model), every=5 if odd else 4, group=comm)

    assert told(worker, odd=0) == (
        "Workers disagree: rank 0 has the method local_sgd(every=5), "
        f"rank 1 has the method local_sgd(every=4). {ADVICE}"
    )


def made(change: Callable[[nn.Sequential], Any]) -> Worker:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        if odd:
            change(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        offbeat.local_sgd(model, torch.optim.SGD(trainable, lr=0.5), group=comm)

    return worker


@pytest.mark.parametrize(
    ("change", "ours", "theirs"),
    [
        (
            lambda m: m.append(nn.Linear(2, 1)),
            "buffer 1.running_mean [2] float32",
            "parameter 2.weight [1, 2] float32",
        ),
        (lambda m: m.pop(1), "parameter 1.weight [2] float32", "nothing more"),
        (
            lambda m: m.__setitem__(0, nn.Linear(4, 2)),
            "parameter 0.weight [2, 3] float32",
            "parameter 0.weight [2, 4] float32",
        ),
        (lambda m: m[1].double(), "parameter 1.weight [2] float32", "parameter 1.weight [2] float64"),
        (
            lambda m: m[1].register_buffer("extra", torch.zeros(1, dtype=torch.int64)),
            "nothing more",
            "buffer 1.extra [1] int64",
        ),
        (
            lambda m: m[1].bias.requires_grad_(False),
            "parameter 1.bias [2] float32",
            f"parameter 1.bias [2] float32, frozen with checksum {checksum([torch.zeros(2)])}",
        ),
    ],
    ids=["another layer", "a layer less", "another shape", "another dtype", "another buffer", "one frozen"],
)
def test_another_model(change: Callable[[nn.Sequential], Any], ours: str, theirs: str) -> None:
    assert told(made(change)) == f"Workers disagree: rank 0 has {ours}, rank 2 has {theirs}. {ADVICE}"


def test_other_frozen_values() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        with torch.no_grad():
            model[0].bias.fill_(2.0 if odd else 1.0).requires_grad_(False)
        trainable = [p for p in model.parameters() if p.requires_grad]
        offbeat.local_sgd(model, torch.optim.SGD(trainable, lr=0.5), group=comm)

    assert told(worker) == (
        "Workers disagree: rank 0 has parameter 0.bias [2] float32, "
        f"frozen with checksum {checksum([torch.full((2,), 1.0)])}, rank 2 has parameter 0.bias [2] float32, "
        f"frozen with checksum {checksum([torch.full((2,), 2.0)])}. {ADVICE}"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8, torch.int64])
def test_frozen_values_of_any_kind(dtype: torch.dtype) -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        frozen = torch.ones(3, 2, dtype=dtype).t()
        frozen[1, 1] = 0 if odd else 1
        model.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
        trainable = [p for p in model.parameters() if p.requires_grad]
        offbeat.local_sgd(model, torch.optim.SGD(trainable, lr=0.5), group=comm)

    kind = f"{str(dtype).removeprefix('torch.')}, frozen with checksum"
    assert f"rank 0 has parameter frozen [2, 3] {kind}" in told(worker)


def test_wrapped_on_some_ranks_is_the_same_model() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    def worker(comm: Communicator) -> str:
        model = Wrapped(net()) if comm.rank == ODD else net()
        return repr(offbeat.local_sgd(model, sgd(model), group=comm))

    assert offbeat.simulate(worker, 4) == ["local_sgd()"] * 4


def test_a_synchronizer_of_parts_is_compared_at_its_first_step() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        part = Exchange(params(model), when=Every(3 if odd else 2), among=comm)
        Synchronizer(sgd(model), [part]).step()

    def method(steps: int) -> str:
        return (
            f"the method Synchronizer([Exchange(params(4 tensors), when=Every(steps={steps}), among=World(), "
            "reduce=Mean(), update=Replace(keep=0.0), delay=0, buffers='average', moments='keep', "
            "drift=True)])"
        )

    assert told(worker) == f"Workers disagree: rank 0 has {method(2)}, rank 2 has {method(3)}. {ADVICE}"


def go(sync: Synchronizer, steps: int) -> None:
    for _ in range(steps):
        sync.step()


def test_another_learning_rate() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        optimizer = sgd(model, lr=0.25 if odd else 0.5)
        go(offbeat.local_sgd(model, optimizer, every=3, group=comm), 3)

    assert told(worker) == (
        "Workers disagree in round 0 at step 3: rank 0 has learning rate 0.5, rank 2 0.25. "
        "Step the learning-rate scheduler on every worker."
    )


def test_a_learning_rate_that_differs_in_its_last_bit_only() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        go(offbeat.ddp(model, sgd(model, lr=0.1 + 2**-54 if odd else 0.1), group=comm), 1)

    assert told(worker) == (
        "Workers disagree in round 0 at step 1: rank 0 has learning rate 0.1, rank 2 0.10000000000000006. "
        "Step the learning-rate scheduler on every worker."
    )


class Own(Schedule):
    """Looks alike everywhere, but plans what it was told to."""

    def __init__(self, period: int | None) -> None:
        self.period = period

    def __repr__(self) -> str:
        return "Own()"

    def next(self, clock: Clock, state: dict[str, Any]) -> int | None:
        return None if self.period is None else clock.step + self.period


def test_another_step() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        go(offbeat.local_sgd(model, sgd(model), every=Own(3 if odd else 2), group=comm), 6)

    assert told(worker) == (
        "Workers disagree at round 0: rank 0 is at step 2, rank 2 at step 3. "
        "Does every worker use the same schedule?"
    )


def test_another_exchange() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        periods = (None, 2) if odd else (2, None)
        parts = [Exchange(params(model), when=Own(period), among=comm) for period in periods]
        go(Synchronizer(sgd(model), parts), 2)

    assert told(worker) == "Workers disagree: rank 0 is at exchange 0 of the method, rank 2 at 1."


def test_another_round() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.local_sgd(model, sgd(model), every=2, group=comm)
        (part,) = sync.parts  # which by itself does not compare what it loads
        state = part.state_dict()
        part.load_state_dict({**state, "rhythm": {**state["rhythm"], "round": 7 if odd else 3}})
        go(sync, 2)

    assert told(worker) == "Workers disagree: rank 0 is at round 3 (step 2), rank 2 at round 7 (step 2)."


BATCHES = "Do all workers have the same number of batches?"


def test_finish_early() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.local_sgd(model, sgd(model), every=4, group=comm)
        go(sync, 3 if odd else 8)
        sync.finish()

    assert told(worker) == (
        f"Workers disagree: rank 0 is in round 0 at step 4, rank 2 in finish() at step 3. {BATCHES}"
    )


def test_in_a_group_ranks_are_numbered_among_all() -> None:
    """Ranks 2 and 3 are a node; 0 and 1 hear of their quarrel when they wait for them."""

    def early(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.hierarchical(model, sgd(model), nodes=2, inner=4, outer=8, group=comm)
        go(sync, 3 if odd else 8)
        sync.finish()

    assert told(early, odd=3) == (
        f"Workers disagree: rank 2 is in round 0 at step 4, rank 3 in finish() at step 3. {BATCHES}"
    )

    def faster(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.hierarchical(model, sgd(model, 0.25 if odd else 0.5), nodes=2, outer=4, group=comm)
        go(sync, 8)

    assert told(faster, odd=3) == (
        "Workers disagree in round 0 at step 1: rank 2 has learning rate 0.5, rank 3 0.25. "
        "Step the learning-rate scheduler on every worker."
    )


def test_finish_on_all_but_one() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.local_sgd(model, sgd(model), every=4, group=comm)
        go(sync, 4 if odd else 3)
        sync.finish()

    assert told(worker) == (
        f"Workers disagree: rank 0 is in finish() at step 3, rank 2 in round 0 at step 4. {BATCHES}"
    )


def test_finish_at_another_step() -> None:
    """No round lies between, so both are in finish(); the steps tell them apart."""

    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.local_sgd(model, sgd(model), every=10, group=comm)
        go(sync, 3 if odd else 4)
        sync.finish()

    assert told(worker) == (
        f"Workers disagree: rank 0 is in finish() at step 4, rank 2 in finish() at step 3. {BATCHES}"
    )


def test_averaged_on_one_rank_only() -> None:
    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        sync = offbeat.local_sgd(model, sgd(model), every=4, group=comm)
        go(sync, 3)
        if odd:
            with sync.averaged():
                raise AssertionError("not reached")
        go(sync, 5)

    assert told(worker) == (
        f"Workers disagree: rank 0 is in round 0 at step 4, rank 2 in averaged() at step 3. {BATCHES}"
    )


def test_a_disagreement_is_no_peers_loss() -> None:
    """Whoever waits for a rank that left because of it hears the same sentence."""

    def worker(comm: Communicator, odd: bool) -> None:
        model = net()
        with offbeat.local_sgd(model, sgd(model, lr=0.25 if odd else 0.5), every=1, group=comm) as sync:
            sync.step()

    def later(comm: Communicator, odd: bool) -> None:
        if comm.rank == 3:
            try:
                worker(comm, odd)
            except offbeat.Disagreement:
                comm.mean([torch.zeros(1)]).wait()  # nobody else comes here
        worker(comm, odd)

    assert told(later).startswith(
        "Workers disagree in round 0 at step 1: rank 0 has learning rate 0.5, rank 2 0.25."
    )
