"""Bad input is answered with one sentence, on every rank, before any training tensor is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import Dyadic, data, optimizer_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.comm.collective import BROADCAST, COLLECTIVES, GATHER, Collective
from offbeat.comm.communicator import Worker
from offbeat.engine.agreement import FORMAT


class Talk(offbeat.Metered):
    """Control messages may be sent, but no tensors of the training, by whatever call."""

    def wrap(self, comm: offbeat.Communicator) -> offbeat.Communicator:
        return type(self)(comm)

    @property
    def worker(self) -> Worker:
        return self

    def sidecar(self) -> offbeat.comm.background.Sidecar:
        raise AssertionError("a sidecar was asked for")

    def run(self, kind: Collective, tensors: Any, *, src: int = 0, control: bool = False) -> Any:
        # Workers that disagree tell each other why, as bytes.
        if control or (kind is GATHER and tensors[0].dtype == torch.uint8):
            return self.comm.run(kind, tensors, src=src, control=control)
        raise AssertionError(f"{kind.name} was called")


def one_round(comm: offbeat.Communicator, method: str) -> str:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    try:
        sync = offbeat.method(method)(model, torch.optim.SGD(model.parameters(), lr=0.1), group=comm)
        model(torch.rand(4, 2)).sum().backward()
        sync.step()
    except AssertionError as error:
        return str(error)
    return "nothing was sent"


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_guard_guards_every_collective(kind: str) -> None:
    talk = Talk(offbeat.Solo())
    for comm in (talk, talk.split([[0]]), talk.worker.duplicate()):
        with pytest.raises(AssertionError, match=f"^{kind} was called$"):
            comm.run(COLLECTIVES[kind], [torch.ones(1)])


def test_the_guard_stops_a_round() -> None:
    """Which begins with rank 0's weights, a broadcast; let through, the mean is next."""
    assert one_round(Talk(offbeat.Solo()), "local_sgd(every=1)") == "broadcast was called"

    class Weights(Talk):
        def run(self, kind: Collective, tensors: Any, *, src: int = 0, control: bool = False) -> Any:
            sends = self.comm if kind is BROADCAST else super()
            return sends.run(kind, tensors, src=src, control=control)

    assert one_round(Weights(offbeat.Solo()), "local_sgd(every=1)") == "mean was called"


def build(comm: offbeat.Communicator, method: str = "local_sgd", **options: Any) -> offbeat.Synchronizer:
    net = options.pop("model", None) or nn.Linear(2, 1)
    opt = options.pop("optimizer", None) or torch.optim.SGD(net.parameters(), lr=0.1)
    return getattr(offbeat, method)(net, opt, group=comm, **options)


def wrapped(comm: offbeat.Communicator, compiled: bool = False) -> offbeat.Synchronizer:
    """As DDP wraps it, but without the process group it wants."""
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = nn.Linear(2, 1)
    model = nn.Sequential(ddp) if compiled else ddp
    return build(comm, model=model)


def strange(comm: offbeat.Communicator) -> offbeat.Synchronizer:
    return build(comm, optimizer=torch.optim.AdamW(nn.Linear(2, 1).parameters()))


def not_a_number(comm: offbeat.Communicator) -> offbeat.Synchronizer:
    net = nn.Linear(2, 1)
    return build(comm, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=float("nan")))


def parameters_given(comm: offbeat.Communicator) -> offbeat.Synchronizer:
    net = nn.Linear(2, 1)
    return build(comm, model=net, optimizer=list(net.parameters()))


def nothing_given(comm: offbeat.Communicator, model: bool) -> offbeat.Synchronizer:
    net = nn.Linear(2, 1)
    return offbeat.local_sgd(net if model else None, None, group=comm)


WRAPPED = (
    "The model is wrapped in DistributedDataParallel, which averages gradients at every step: "
    "train the model itself, without the wrapper (in Accelerate, prepare_model(model, evaluation_mode=True); "
    "in transformers, OffbeatTrainer; in Lightning, OffbeatStrategy)."
)
# What is wrong, the call, its options, the kind of the error, and its sentence.
BAD: list[tuple[str, Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (
        "unknown argument",
        build,
        {"evry": 3},
        TypeError,
        "local_sgd has no argument 'evry' (did you mean 'every'?); it takes every, delay, gain, reduce, "
        "buffers, moments, drift, guard.",
    ),
    ("every 0", build, {"every": 0}, ValueError, "Every(steps=0): steps must be at least 1."),
    (
        "every 2.5",
        build,
        {"every": 2.5},
        TypeError,
        "every=2.5: every must be a whole number of steps, or a schedule such as Every(8).",
    ),
    (
        "long delay",
        build,
        {"every": 3, "delay": 4},
        ValueError,
        "delay=4 with Every(steps=3): delay must not exceed the period, which can be 3.",
    ),
    (
        "strange delay",
        build,
        {"delay": "never"},
        ValueError,
        "delay='never': delay must be a number of steps, at least 0, or \"round\".",
    ),
    (
        "gain 2",
        build,
        {"every": 3, "delay": 2, "gain": 2.0},
        ValueError,
        "Correct(gain=2.0): gain must be above 0 and at most 1.",
    ),
    (
        "a gain with feedback",
        build,
        {"every": 3, "delay": 2, "gain": 0.5, "reduce": offbeat.ErrorFeedback(offbeat.Quantized(8))},
        ValueError,
        "reduce=ErrorFeedback(code=Quantized(bits=8, block=256, stochastic=False, seed=0)) with "
        "update=Rebase(gain=0.5): values that were not sent would be kept by the worker and by the residual, "
        "and sent twice; use gain=1.0, or leave out the feedback.",
    ),
    (
        "gain 0 without a delay",
        build,
        {"gain": 0.0},
        ValueError,
        "Correct(gain=0.0): gain must be above 0 and at most 1.",
    ),
    (
        "strange buffers",
        build,
        {"buffers": "sum"},
        ValueError,
        "buffers='sum': choose one of 'average', 'keep', 'follow'.",
    ),
    (
        "strange moments",
        build,
        {"moments": "sum"},
        ValueError,
        "moments='sum': choose one of 'keep', 'average', 'reset'.",
    ),
    (
        "uneven nodes",
        build,
        {"method": "hierarchical", "nodes": 3},
        ValueError,
        "Subgroups(3): 2 workers do not divide into groups of 3; for uneven groups, list the ranks of each.",
    ),
    ("wrapped", wrapped, {}, TypeError, WRAPPED),
    ("wrapped inside", wrapped, {"compiled": True}, TypeError, WRAPPED),
    (
        "strange optimizer",
        strange,
        {},
        ValueError,
        "AdamW holds parameters that are not in the model: build it from the model passed here.",
    ),
    (
        "None for the optimizer",
        nothing_given,
        {"model": True},
        TypeError,
        "optimizer=None: pass a torch Optimizer, or a list of them.",
    ),
    (
        "None for the model",
        nothing_given,
        {"model": False},
        TypeError,
        "local_sgd(model=None): model must be a torch module.",
    ),
    (
        "fragments that take turns within a growing period",
        build,
        {"method": "streaming_diloco", "every": offbeat.QSR(0.5), "fragments": 1},
        TypeError,
        "every=QSR(alpha=0.5, base=4, warmup=0, peak=None, total=None, power=2.0): fragments take turns "
        "within a fixed period; give a number.",
    ),
    (
        "no optimizer",
        parameters_given,
        {},
        TypeError,
        "optimizer holds a Parameter: pass a torch Optimizer, or a list of them.",
    ),
    (
        "nan",
        not_a_number,
        {},
        ValueError,
        "The learning rate is nan: it must be a finite number; look at its scheduler.",
    ),
]
ids = [bad[0] for bad in BAD]


def attempt(comm: offbeat.Communicator, bad: int, guilty: Sequence[int]) -> str:
    """A bad call on the guilty ranks, a good one on the others; then all go on with a good one."""
    _, call, options, kind, _ = BAD[bad]
    try:
        if comm.rank in guilty:
            call(Talk(comm), **options)
        else:
            build(Talk(comm))
        answer = "no error"
    except (kind, offbeat.Disagreement) as error:
        answer = f"{type(error).__name__}: {error}"
    sync = build(comm)
    sync.model(torch.ones(1, 2)).sum().backward()
    sync.step()
    sync.finish()
    return answer


@pytest.mark.parametrize("bad", range(len(BAD)), ids=ids)
def test_a_bad_call_everywhere(pool: Pool, bad: int) -> None:
    *_, kind, sentence = BAD[bad]
    answer = f"{kind.__name__}: {sentence}"
    assert pool.run(attempt, bad, (0, 1), workers=2) == [answer] * 2
    assert offbeat.simulate(lambda comm: attempt(comm, bad, (0, 1)), 2) == [answer] * 2


@pytest.mark.parametrize("bad", range(len(BAD)), ids=ids)
def test_a_bad_call_on_one_rank(pool: Pool, bad: int) -> None:
    """The others do not wait for it: they are told."""
    *_, kind, sentence = BAD[bad]
    told = (
        f"Disagreement: Workers disagree: rank 0 has the method local_sgd(), rank 1 has the error "
        f"{sentence!r}. Build the same model and method on every worker."
    )
    assert pool.run(attempt, bad, (1,), workers=2) == [told, f"{kind.__name__}: {sentence}"]


def test_a_missing_argument() -> None:
    with pytest.raises(TypeError, match=r"^post_local_sgd needs switch=\.$"):
        build(offbeat.Solo(), "post_local_sgd")


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (
            "local_sgd(evry=3)",
            "local_sgd has no argument 'evry' (did you mean 'every'?); it takes every, delay",
        ),
        ("qsr()", "qsr needs alpha=."),
        ("local_sgd(every=)", "this is not a valid expression: invalid syntax."),
        ("local_sgd(every=Every())", "Every needs steps=."),
        ("local_sgd(every=Every(3).steps)", "'Every(3).steps' is not supported; use numbers, strings and"),
        ("local_sgd(every=__import__('os'))", "\"__import__('os')\" is not supported; use numbers, strings"),
        ("local_sgd(**{'every': 3})", "** is not supported."),
    ],
)
def test_expressions(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
        offbeat.method(expression)
    assert str(caught.value).startswith(f"method({expression!r}): {sentence}")


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "os.system('true')", "(lambda: 0)()", "recorded()", "Exchange(1)", "3"]
)
def test_expressions_are_never_evaluated(expression: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
        offbeat.method(expression)
    assert str(caught.value).startswith(f"method({expression!r}): ")
    assert "\n" not in str(caught.value)


def turns_to_nan(comm: offbeat.Communicator, guilty: Sequence[int]) -> None:
    net = Dyadic()
    opt = optimizer_for(net)
    sync = offbeat.local_sgd(net, opt, every=2, group=comm)
    for step in range(6):
        net(data(comm.rank, step)).backward()
        if step == 3 and comm.rank in guilty:
            opt.param_groups[0]["lr"] = float("nan")
        sync.step()


def test_a_learning_rate_that_turns_to_nan(pool: Pool) -> None:
    sentence = "The learning rate is nan: it must be a finite number; look at its scheduler."
    everywhere = pool.attempt(turns_to_nan, (0, 1, 2), workers=3)
    assert [(type(answer), str(answer)) for answer in everywhere] == [(ValueError, sentence)] * 3
    told = f"Round 1 (step 4): Waiting for all ranks to report: rank 1 failed (ValueError: {sentence})."
    mixed = pool.attempt(turns_to_nan, (1,), workers=3)
    assert [str(answer) for answer in mixed] == [told, sentence, told]
    assert [type(answer) for answer in mixed] == [offbeat.PeerLost, ValueError, offbeat.PeerLost]


def other_checkpoint(comm: offbeat.Communicator, guilty: Sequence[int], change: dict[str, Any]) -> list[str]:
    net = Dyadic()
    sync = offbeat.local_sgd(net, optimizer_for(net), every=2, group=comm)
    state = sync.state_dict()
    if comm.rank in guilty:
        state = state | change if change else {"weight": 1}
    answers = []
    try:
        sync.load_state_dict(state)
    except offbeat.CheckpointMismatch as error:
        answers.append(str(error))
    for step in range(4):  # having caught it, everybody may begin anew
        net(data(comm.rank, step)).backward()
        sync.step()
    sync.finish()
    return answers


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "ddp()"}, "The checkpoint has method ddp(), this run has local_sgd(every=2)."),
        ({"workers": 8}, "The checkpoint has workers 8, this run has 3."),
        ({"rank": 7}, "The checkpoint has rank 7, this worker has 1: every rank loads its own."),
        ({}, f"The checkpoint has format None, this run has {FORMAT}."),
    ],
)
def test_a_checkpoint_that_does_not_fit(pool: Pool, change: dict[str, Any], sentence: str) -> None:
    told = "Rank 1 cannot load its checkpoint: see its error."
    assert pool.run(other_checkpoint, (1,), change, workers=3, fresh=True) == [[told], [sentence], [told]]
    if "rank" not in change:
        answers = pool.run(other_checkpoint, (0, 1, 2), change, workers=3, fresh=True)
        assert answers == [[sentence]] * 3


def late(comm: offbeat.Communicator) -> list[str]:
    net = Dyadic()
    sync = offbeat.local_sgd(net, optimizer_for(net), group=comm)
    net(data(comm.rank, 0)).backward()
    sync.step()
    sync.finish()
    sync.finish()  # once more is nothing
    answers = []
    for call in (sync.step, sync.before_step, lambda: sync.load_state_dict({})):
        with pytest.raises(RuntimeError) as caught:
            call()
        answers.append(str(caught.value))
    return answers


def test_step_after_finish(pool: Pool) -> None:
    rest = "this run was ended by finish(): make a new synchronizer."
    answers = [f"step(): {rest}", f"before_step(): {rest}", f"load_state_dict(): {rest}"]
    assert pool.run(late, workers=2) == [answers] * 2


def test_calls_at_a_bad_moment() -> None:
    net = Dyadic()
    sync = offbeat.local_sgd(net, optimizer_for(net))
    net(data(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"^after_step\(\): call before_step\(\) first\.$"):
        sync.after_step()
    sync.before_step()
    with pytest.raises(RuntimeError, match=r"^before_step\(\): a step is under way"):
        sync.before_step()
    with pytest.raises(RuntimeError, match=r"^averaged\(\): a step is under way"), sync.averaged():
        pass
    with pytest.raises(RuntimeError, match=r"^state_dict\(\): a step is under way"):
        sync.state_dict()
    sync.after_step()
    with sync.averaged():
        for call in (sync.step, sync.finish, sync.state_dict):
            with pytest.raises(RuntimeError, match=r"leave averaged\(\) first"):
                call()
        with pytest.raises(RuntimeError, match=r"^averaged\(\): leave averaged\(\) first"), sync.averaged():
            pass
