"""What becomes of the optimizer's moments in a round: kept, averaged or reset, in every method.

On slopes the moments do not depend on the weights, so they are known whatever a method does to those.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from conftest import Pool
from sentences import says
from slopes import Walk, odd

import offbeat

# Each method with its period and delay in steps; "round": it lands just before the next round begins.
METHODS: list[tuple[str, int, int | str]] = [
    ("local_sgd(every=2", 2, 0),
    ("slowmo(every=2", 2, 0),
    ("diloco(every=2", 2, 0),
    ("noloco(every=2", 2, 0),
    ("palsgd(p=0.0, every=2", 2, 0),
    ("palsgd(p=0.4, shared=False, every=5", 3, 0),
    ("adaptive(sample=100, start=2", 2, 0),
    ("adacomm(interval=100, start=2", 2, 0),
    ("dasgd(every=3, delay=1", 3, 1),
    ("cocod(every=3, delay=2", 3, 2),
    ("streaming_diloco(every=3, delay=1, fragments=1", 3, 1),
    ("streaming_diloco(every=2, delay=0, fragments=1", 2, 0),
    ("eager_diloco(every=2", 2, "round"),
    ("overlap_local_sgd(every=2", 2, "round"),
]
STEPS = 7

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.5),
    "adam": functools.partial(torch.optim.Adam, betas=(0.5, 0.75)),
}

Moments = dict[str, float]


def after_a_gradient(moments: Moments, name: str, g: float) -> Moments:
    if name == "sgd":
        return {"momentum_buffer": 0.5 * moments.get("momentum_buffer", 0.0) + g}
    return {
        "exp_avg": 0.5 * moments.get("exp_avg", 0.0) + 0.5 * g,
        "exp_avg_sq": 0.75 * moments.get("exp_avg_sq", 0.0) + 0.25 * g * g,
        "step": moments.get("step", 0.0) + 1,
    }


def by_hand(rule: str, optimizer: str, period: int, delay: int | str) -> list[list[Moments]]:
    """The moments of two workers after every step."""
    now: list[Moments] = [{}, {}]
    air: tuple[int | None, list[Moments]] | None = None  # when it lands, and what was sent
    trace = []
    for step in range(1, STEPS + 1):
        now = [after_a_gradient(moments, optimizer, odd(rank, step)) for rank, moments in enumerate(now)]
        begins = step % period == 0
        if air and (air[0] == step or (begins and air[0] is None)):
            now, air = landed(rule, now, air[1]), None
        if begins:
            due = step + delay if isinstance(delay, int) else None
            air = (due, now)
            if delay == 0:
                now, air = landed(rule, now, now), None
        trace.append(now)
    return trace


def landed(rule: str, now: list[Moments], sent: list[Moments]) -> list[Moments]:
    if rule == "reset":
        return [dict.fromkeys(moments, 0.0) for moments in now]
    if rule == "keep":
        return now
    result = []
    for rank, moments in enumerate(now):
        changed = dict(moments)
        for key in moments.keys() - {"step"}:
            mean = (sent[0][key] + sent[1][key]) / 2
            # Moved by as much as what was sent, but not beyond the mean that landed.
            low, high = sorted((moments[key], mean))
            changed[key] = min(max(moments[key] + mean - sent[rank][key], low), high)
        result.append(changed)
    return result


@pytest.mark.few(28)
@pytest.mark.parametrize("rule", ["keep", "average", "reset"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("start", "period", "delay"), METHODS)
def test_moments(start: str, period: int, delay: int | str, optimizer: str, rule: str) -> None:
    def worker(comm: offbeat.Communicator) -> list[Moments]:
        walk = Walk(comm, f"{start}, moments={rule!r})", optimizer=OPTIMIZERS[optimizer], lr=0.125)
        trace = []
        for _ in range(STEPS):
            walk.sync.observe(1.0)
            walk.go()
            trace.append(found(walk.opt))
        return trace

    traces = offbeat.simulate(worker, 2)
    for step, expected in enumerate(by_hand(rule, optimizer, period, delay)):
        for rank in range(2):
            assert traces[rank][step] == pytest.approx(expected[rank], rel=1e-12), f"step {step + 1}"


def found(optimizer: torch.optim.Optimizer) -> Moments:
    (state,) = optimizer.state.values()
    return {key: float(value) for key, value in state.items()}


def test_fragments_reset_their_own_moments_only() -> None:
    def worker(comm: offbeat.Communicator) -> list[list[float]]:
        expression = "streaming_diloco(every=4, fragments=2, delay=0, moments='reset')"
        walk = Walk(comm, expression, layers=2, optimizer=OPTIMIZERS["sgd"])
        trace = []
        for _ in range(4):
            walk.go()
            states = [walk.opt.state[p] for p in walk.net.parameters()]
            trace.append([state["momentum_buffer"].item() for state in states])
        return trace

    # b = 1, 1.5, 1.75, 1.875 without a reset; layer 1 is reset after 2, layer 0 after 4.
    (trace,) = offbeat.simulate(worker, 1)
    assert trace == [[1, 1], [1.5, 0], [1.75, 1], [0, 1.5]]


def test_averaging_leaves_the_count_of_steps() -> None:
    """Also of a scalar, whose moments have the shape of that count. Rank 1 has skipped a step."""

    def worker(comm: offbeat.Communicator) -> tuple[float, float]:
        net = torch.nn.ParameterList([torch.zeros(())])
        opt = torch.optim.Adam(net.parameters(), betas=(0.5, 0.75))
        sync = offbeat.diloco(net, opt, every=3, moments="average", group=comm)
        for step in range(3):
            (net[0] * odd(comm.rank, step)).backward()
            sync.step((lambda: None) if comm.rank == 1 and step == 1 else None)
            opt.zero_grad()
        state = opt.state[net[0]]
        return state["step"].item(), state["exp_avg"].item()

    # 0.5 + 0.25 + 0.125 of slope 1, 0.5 + 0.25 of slope 3
    assert offbeat.simulate(worker, 2) == [(3, 1.5625), (2, 1.5625)]


# Averaged where all have them.


def uneven(comm: offbeat.Communicator) -> list[float | None]:
    """Rank 1 never uses weight 1, and nobody weight 3."""
    net = torch.nn.ParameterList([torch.zeros(1) for _ in range(4)])
    opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    sync = offbeat.local_sgd(net, opt, every=1, moments="average", group=comm)
    for i in (0, 2) if comm.rank == 1 else (0, 1, 2):
        net[i].grad = torch.full((1,), 2.0 * comm.rank + i + 1)
    sync.step()
    return [opt.state[p]["momentum_buffer"].item() if p in opt.state else None for p in net]


# The means of 1 and 3, and of 3 and 5.
UNEVEN = [[2.0, 2.0, 4.0, None], [2.0, None, 4.0, None]]


def test_moments_that_all_have_are_averaged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        assert offbeat.simulate(uneven, 2) == UNEVEN
    assert [record.message for record in caplog.records] == [
        "Not all workers have the optimizer moments of 1 of 4 tensors: these are not averaged in this round."
    ] * 2


def test_real_workers_agree_on_the_moments_that_all_have(pool: Pool) -> None:
    assert pool.run(uneven, workers=2) == UNEVEN


@pytest.mark.parametrize("every", [1, 3])
def test_what_all_have_costs_no_further_message(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with a delay it is the moments of the round itself that land."""
    gathered: list[int] = []
    gather = offbeat.Metered.gather

    def noted(self: offbeat.Metered, tensor: torch.Tensor) -> Any:
        gathered.append(tensor.numel())
        return gather(self, tensor)

    monkeypatch.setattr(offbeat.Metered, "gather", noted)

    def worker(comm: offbeat.Communicator, uses: int) -> list[float]:
        net = torch.nn.ParameterList([torch.zeros(1) for _ in range(2)])
        opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
        sync = offbeat.local_sgd(net, opt, every=every, delay=1, moments="average", group=comm)
        for _ in range(2 * every):
            for i in range(uses if comm.rank else 2):
                net[i].grad = torch.full((1,), 2.0 * comm.rank + i + 1)
            sync.step()
        sync.finish()
        return [opt.state[p]["momentum_buffer"].item() for p in net if p in opt.state]

    offbeat.simulate(lambda comm: worker(comm, 2), 2)
    assert gathered == []
    first, second = offbeat.simulate(lambda comm: worker(comm, 1), 2)
    assert gathered == [2] * 4
    assert (len(first), len(second)) == (2, 1)


# Reset: as in an optimizer that was just built.


class Initialised(torch.optim.Optimizer):
    """A user's own, whose state exists before its first step."""

    def __init__(self, params: Any, lr: float = 0.1, first: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "first": first})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"scale": torch.full_like(p, group["first"]), "uses": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    p.sub_(group["lr"] * state["scale"] * p.grad / (1 + state["uses"]))
                    state["scale"].mul_(0.5)
                    state["uses"] += 1


class VirtualQueue(torch.optim.Adam):
    """A user's own, whose state is made in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("start", p.clone())
                p.add_(state["start"], alpha=0.01)


class Wrapped(torch.optim.SGD):
    """One that cannot be built from the options in its groups."""

    def __init__(self, network: torch.nn.Module, lr: float) -> None:
        super().__init__(network.parameters(), lr=lr, momentum=0.5, dampening=0.5)


NEWBORN: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adadelta, {"rho": 0.5, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adafactor, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "fused": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adamax, {"foreach": True}),
    (torch.optim.ASGD, {"t0": 1.0}),
    (torch.optim.ASGD, {"t0": 1.0, "lambd": 0.1, "alpha": 0.5, "foreach": True}),
    (torch.optim.LBFGS, {"max_iter": 2}),
    (torch.optim.LBFGS, {"max_iter": 3, "history_size": 2}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.RAdam, {"foreach": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Rprop, {"etas": (0.25, 2.0), "foreach": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.5}),
    (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.25}),
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.25, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.25, "fused": True}),
    (torch.optim.SparseAdam, {}),
    (Initialised, {"first": 3.0}),
    (VirtualQueue, {}),
]
if hasattr(torch.optim, "Muon"):
    NEWBORN.append((torch.optim.Muon, {}))


class Matrices(torch.nn.Module):
    def __init__(self, complex_too: bool) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.weights = torch.nn.ParameterList(
            [torch.randn(4, 3, generator=g), torch.randn(2, 5, generator=g)]
        )
        if complex_too:
            self.weights.append(torch.randn(3, dtype=torch.complex64, generator=g))

    def gradients(self, step: int, sparse: bool = False) -> None:
        g = torch.Generator().manual_seed(step)
        for p in self.weights:
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=g)
            if sparse:
                p.grad = p.grad.to_sparse(1)


@pytest.mark.parametrize(
    ("kind", "options"), NEWBORN, ids=[f"{kind.__name__}-{options}" for kind, options in NEWBORN]
)
def test_after_a_reset_optimizers_step_like_new_ones(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    options = {"lr": 0.1, **options}
    real = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, Initialised, VirtualQueue)
    fits = kind not in real and kind.__name__ != "Muon" and not options.get("fused")
    net = Matrices(complex_too=fits)
    opt = kind(net.parameters(), **options)
    sparse = kind is torch.optim.SparseAdam
    sync = offbeat.local_sgd(net, opt, every=3, moments="reset")

    def stepped(model: Matrices, optimizer: torch.optim.Optimizer, step: int) -> None:
        def closure() -> float:
            model.gradients(step, sparse)
            return 1.0

        optimizer.step(closure) if kind is torch.optim.LBFGS else (closure(), optimizer.step())

    for step in range(3):
        sync.step(lambda step=step: stepped(net, opt, step))
    shapes = tensor_shapes(opt)
    other = Matrices(complex_too=fits)
    other.load_state_dict(net.state_dict())
    new = kind(other.parameters(), **options)
    moved = 0
    for step in range(3, 6):
        before = [p.detach().clone() for p in net.weights]
        stepped(net, opt, step)
        stepped(other, new, step)
        for p, q in zip(net.weights, other.weights, strict=True):
            assert torch.equal(p, q), f"step {step}"
        moved += any(not torch.equal(p, b) for p, b in zip(net.weights, before, strict=True))
    assert moved == 3
    states = opt.state_dict()["state"], new.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for i in states[0]:
        assert states[0][i].keys() == states[1][i].keys()
    if kind is not torch.optim.LBFGS:
        assert shapes.items() <= tensor_shapes(opt).items()


def tensor_shapes(optimizer: torch.optim.Optimizer) -> dict[str, torch.Size]:
    """Of what it remembers of its first parameter."""
    state = optimizer.state_dict()["state"].get(0, {})
    return {key: value.shape for key, value in state.items() if torch.is_tensor(value)}


def test_a_reset_writes_in_place() -> None:
    """A captured graph goes on with the very tensors."""
    net = Matrices(complex_too=False)
    opt = torch.optim.Adam(net.parameters(), fused=True)
    sync = offbeat.local_sgd(net, opt, every=2, moments="reset")
    kept = []
    for step in range(2):
        net.gradients(step)
        sync.step()
        kept.append([value for state in opt.state.values() for value in state.values()])
    assert all(a is b for a, b in zip(*kept, strict=True))
    assert not any(value.any() for value in kept[1])


def test_an_optimizer_that_cannot_be_built_anew() -> None:
    """Before its first step its state is known to be made lazily; afterwards nothing is known."""
    net = Matrices(complex_too=False)
    opt = Wrapped(net, lr=0.1)
    sync = offbeat.local_sgd(net, opt, every=1, moments="reset")
    net.gradients(0)
    sync.step()
    assert not opt.state
    opt.step()
    sentence = (
        'moments="reset" with Wrapped, whose state before its first step is unknown: make the synchronizer '
        "before the optimizer steps or loads a checkpoint."
    )
    with says(ValueError, sentence):
        offbeat.local_sgd(net, opt, every=1, moments="reset")
    offbeat.local_sgd(net, opt, every=1, moments="average")
