"""Live tensors and their packing: nothing is lost, doubled, moved or re-bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Dyadic, integers
from sentences import says
from torch import Tensor, nn

import offbeat
from offbeat import Clock, Communicator, Every, Exchange, Packed, Reducer, Synchronizer, grads, params
from offbeat.base.tensors import clean_names, local, trainable


def awkward() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(3, 5, generator=g),
        "scalar": torch.randn((), generator=g),
        "empty": torch.zeros(0),
        "empty too": torch.zeros(4, 0, 2, dtype=torch.float64),
        "one": torch.randn(1, generator=g, dtype=torch.float64),
        "half": torch.randn(7, generator=g).half(),
        "brain": torch.randn(2, 3, generator=g).bfloat16(),
        "turned": torch.randn(4, 6, generator=g).t(),
        "strided": torch.randn(20, generator=g)[::3],
        "expanded like": torch.randn(2, 3, 4, generator=g).permute(2, 0, 1),
        "double": torch.randn(2, 2, generator=g, dtype=torch.float64),
        "whole": torch.arange(5),
        "bits": torch.tensor([True, False, True]),
    }


def packed(tensors: dict[str, Tensor]) -> Packed:
    made = Packed.like(tensors)
    made.read(list(tensors.values()))
    return made


def test_the_sum_of_what_was_packed_is_the_whole() -> None:
    tensors = awkward()
    made = packed(tensors)
    kinds = [flat.dtype for flat in made.flats]
    assert kinds == [torch.float32, torch.float64, torch.int64, torch.bool]  # in order of appearance
    assert sum(flat.numel() for flat in made.flats) == sum(t.numel() for t in tensors.values())
    for kind, flat in zip(kinds, made.flats, strict=True):
        own = [t for t in tensors.values() if (torch.float32 if t.dtype.itemsize == 2 else t.dtype) == kind]
        assert torch.equal(flat, torch.cat([t.to(kind).flatten() for t in own]))
        assert flat.is_contiguous()


def test_there_and_back_to_the_bit() -> None:
    tensors = awkward()
    made = packed(tensors)
    for (name, original), view in zip(tensors.items(), made.views, strict=True):
        assert view.shape == original.shape, name
        assert torch.equal(view, original.to(view.dtype)), name
    back = {name: torch.zeros_like(t) for name, t in tensors.items()}
    assert not back["turned"].is_contiguous()
    places = [t.data_ptr() for t in back.values()]
    made.write(list(back.values()))
    for name, original in tensors.items():
        assert torch.equal(back[name], original), name
        assert back[name].dtype == original.dtype
    assert [t.data_ptr() for t in back.values()] == places


def test_extreme_values_survive() -> None:
    values = [0.0, -0.0, 1e-45, -3.4e38, float("inf"), float("-inf"), float("nan"), 65504.0, 2**-24]
    tensors = {str(d): torch.tensor(values).to(d) for d in (torch.float32, torch.bfloat16, torch.float16)}
    back = [torch.zeros_like(t) for t in tensors.values()]
    packed(tensors).write(back)
    for after, before in zip(back, tensors.values(), strict=True):
        whole = torch.int32 if before.dtype == torch.float32 else torch.int16
        assert torch.equal(after.view(whole), before.view(whole))


def test_views_are_the_flats() -> None:
    made = packed(awkward())
    for flat in made.flats:
        flat.zero_()
    assert all(not view.any() for view in made.views)
    made.views[0].fill_(1.0)
    assert made.flats[0].sum() == 15


def test_copies_by_name() -> None:
    tensors = awkward()
    made = packed(tensors)
    copies = made.tensors()
    assert list(copies) == list(tensors) == list(made.names)
    made.flats[0].zero_()
    assert torch.equal(copies["matrix"], tensors["matrix"])


def test_nothing_packed() -> None:
    made = Packed.like({})
    made.read([])
    made.write([])
    assert (made.flats, made.views, made.tensors()) == ([], [], {})
    assert [part.names for part in made.cut(0, 0)] == [(), (), ()]


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
            st.sampled_from([(), (0,), (1,), (3,), (2, 2)]),
        ),
        max_size=8,
    ),
    cuts=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
def test_cuts_share_memory_and_cover_everything(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], cuts: tuple[int, int]
) -> None:
    tensors = {f"t{i}": torch.full(shape, i + 1.0, dtype=dtype) for i, (dtype, shape) in enumerate(kinds)}
    made = packed(tensors)
    first = min(cuts[0], len(kinds))
    second = min(cuts[1], len(kinds) - first)
    parts = made.cut(first, second)
    assert [len(part.names) for part in parts] == [first, second, len(kinds) - first - second]
    assert sum((part.names for part in parts), ()) == made.names
    views = [view for part in parts for view in part.views]
    assert all(torch.equal(a, b) for a, b in zip(views, made.views, strict=True))
    total = sum(flat.double().sum() for flat in made.flats)
    assert sum(flat.double().sum() for part in parts for flat in part.flats) == total
    assert sum(flat.numel() for p in parts for flat in p.flats) == sum(t.numel() for t in tensors.values())
    for part in parts:
        for flat in part.flats:
            flat.add_(1)  # seen in the whole, and each value exactly once
    for view, original in zip(made.views, tensors.values(), strict=True):
        assert torch.equal(view, original.to(view.dtype) + 1)
    for part in parts:  # a part is cut like the whole
        again = [flat for piece in part.cut(len(part.names) // 2) for flat in piece.flats]
        assert sum(flat.numel() for flat in again) == sum(flat.numel() for flat in part.flats)
        for piece in part.cut(len(part.names) // 2):
            assert sum(f.double().sum() for f in piece.flats) == sum(v.double().sum() for v in piece.views)


def test_writing_measures_the_change_in_the_same_pass() -> None:
    """Long, turned, narrow, wide and empty ones; the weights get the bits of a plain write."""
    long = {"long": torch.randn(3, 50_001, generator=torch.Generator().manual_seed(0))}
    tensors = {name: t for name, t in {**awkward(), **long}.items() if t.is_floating_point()}
    mean = packed(tensors).scaled(1 / 3)
    before = {name: torch.ones_like(t) for name, t in tensors.items()}
    after = {name: t.clone(memory_format=torch.preserve_format) for name, t in before.items()}
    distance = mean.write_and_measure(list(after.values()))
    packed(tensors).scaled(1 / 3).write(list(before.values()))
    for name, written in after.items():
        assert torch.equal(written, before[name]), name
    exact = sum((torch.ones_like(v) - v).double().square().sum() for v in mean.views)
    assert distance == pytest.approx(exact.item(), rel=1e-6)


def test_complex_numbers_are_two_real_ones() -> None:
    value = nn.Parameter(torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]]).t())
    real = local(value)
    assert real.shape == (2, 2, 2)
    assert not real.requires_grad
    with torch.no_grad():
        real[0, 0, 0] = 7.0
    assert value[0, 0].item() == 7 + 2j
    assert local(torch.tensor(1 + 2j)).tolist() == [1.0, 2.0]


class Wrapped(nn.Module):
    """As DataParallel and the like do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


class Compiled(nn.Module):
    """As torch.compile does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def test_names_lose_what_wrappers_put_before_them() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = {name for name, _ in plain.named_parameters()}
    assert set(trainable(plain)) == expected
    assert set(trainable(Wrapped(plain))) == expected
    assert set(trainable(Compiled(plain))) == expected
    assert set(trainable(Wrapped(Compiled(Wrapped(plain))))) == expected
    inside = nn.ModuleDict({"layer": Wrapped(nn.Linear(1, 1))})
    assert set(trainable(inside)) == {"layer.weight", "layer.bias"}


def test_names_that_would_collide_stay_as_they_are() -> None:
    both = nn.ModuleDict({"a": Wrapped(nn.Linear(1, 1, bias=False))})
    both["a"].weight = nn.Parameter(torch.zeros(1))
    assert set(trainable(both)) == {"a.weight", "a.module.weight"}
    t = torch.zeros(1)
    assert list(clean_names([("module.x", t), ("x", t), ("module.y", t)])) == ["module.x", "x", "module.y"]
    assert list(clean_names([("module.x", t), ("modules.x", t), ("y_orig_mod.z", t)])) == [
        "x",
        "modules.x",
        "y_orig_mod.z",
    ]


def test_live_tensors() -> None:
    model = Dyadic()
    live = params(model)
    names = ["first.linear", "first.quadratic", "second.turned", "scalar", "empty", "idle"]
    assert sorted(live.names) == sorted(names)  # tied once, none frozen
    assert [t.data_ptr() for t in live.tensors()] == [p.data_ptr() for p in live.parameters]
    assert list(live.like()) == list(live.names)
    assert repr(live) == "params(6 tensors)"
    assert repr(grads(model)) == "grads(6 tensors)"
    assert (live.early, grads(model).early) == (False, True)
    assert live.notes() == {}


def test_only_some_of_them() -> None:
    model = Dyadic()
    assert params(model, only=["second.turned", "scalar"]).names == (
        "scalar",
        "second.turned",
    )  # as they come
    with says(ValueError, "params(model, only=...): the model has no trainable 'frozen'."):
        params(model, only=["scalar", "frozen"])


class Zoo(nn.Module):
    """One parameter of every awkward kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(integers(g, 3, 5))
        self.scalar = nn.Parameter(integers(g))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.one = nn.Parameter(integers(g, 1).double())
        self.short = nn.Parameter(integers(g, 3).half())
        self.brain = nn.Parameter(integers(g, 2, 2).bfloat16())
        self.turned = nn.Parameter(integers(g, 2, 4).t())
        self.wave = nn.Parameter(torch.complex(integers(g, 2, 3), integers(g, 2, 3)))
        self.tied = self.matrix
        self.frozen = nn.Parameter(integers(g, 2) * 0 + 3, requires_grad=False)


def part_averages(model: nn.Module, comm: offbeat.Communicator, **options: object) -> Synchronizer:
    part = Exchange(params(model), when=Every(1), among=comm, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return Synchronizer(optimizer, [part])


def nudged(model: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(amount)


@pytest.mark.parametrize("gradients", ["none", "zero", "one"])
@pytest.mark.parametrize(
    "update", [offbeat.Replace(), offbeat.Replace(keep=0.5), offbeat.Correct()], ids=repr
)
def test_averaging_is_in_place(gradients: str, update: offbeat.Update) -> None:
    """Rank r adds 4r to rank 0's weights: the mean of two adds 2, whatever the gradients are."""

    def worker(comm: offbeat.Communicator) -> None:
        model = Zoo(seed=comm.rank)
        original = {name: p.detach().clone() for name, p in Zoo(seed=0).named_parameters()}
        known = dict(model.named_parameters())
        places = {name: (p.data_ptr(), p.data.data_ptr(), id(p), p.stride()) for name, p in known.items()}
        sync = part_averages(model, comm, update=update)
        if gradients != "none":
            for p in known.values():
                p.grad = torch.zeros_like(p) if gradients == "zero" else torch.ones_like(p)
        handles = {
            name: p.detach() for name, p in known.items()
        }  # share memory for as long as it is not re-bound
        step = 1.0 if gradients == "one" else 0.0

        def local_step() -> None:
            for optimizer in sync.optimizers:
                optimizer.step()
            nudged(model, 4.0 * comm.rank)

        sync.step(local_step)
        keep = update.keep if isinstance(update, offbeat.Replace) else 0.0
        for name, p in model.named_parameters():
            assert (p.data_ptr(), p.data.data_ptr(), id(p), p.stride()) == places[name], name
            assert torch.equal(handles[name], p.detach()), name
            if name == "frozen":
                assert p.tolist() == [3.0, 3.0]
                continue
            want = original[name] - step + keep * 4.0 * comm.rank + (1 - keep) * 2.0
            assert torch.equal(p.detach(), want), name
            if gradients == "none":
                assert p.grad is None
            else:
                assert torch.equal(p.grad, torch.full_like(p, step)), name

    offbeat.simulate(worker, 2)


def test_tied_parameters_are_sent_once() -> None:
    """Five floats of one tied matrix: 20 bytes, not 40; and the header and drift of a round."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 1, bias=False)
            self.b = nn.Linear(5, 1, bias=False)
            self.b.weight = self.a.weight

    def worker(comm: offbeat.Communicator) -> tuple[int, list[float]]:
        model = Tied()
        sync = part_averages(model, comm)
        model.a.weight.grad = torch.full((1, 5), float(comm.rank))
        before = model.a.weight.detach().clone()
        sync.step()
        return sync.reports[0].bytes_sent, (before - model.a.weight.detach())[0].tolist()

    (sent, _), (other, _) = offbeat.simulate(worker, 2)
    assert sent == other == 20 + 64 + 16  # 2n(K−1)/K = n with two workers


def test_frozen_parameters_stay_what_they_are() -> None:
    """Equal on all ranks at the start, as is checked; whatever becomes of them later is left alone."""

    def worker(comm: offbeat.Communicator) -> tuple[list[float], list[float]]:
        model = Zoo(seed=comm.rank)
        sync = part_averages(model, comm)
        for step in range(2):
            sync.step()
            with torch.no_grad():
                model.frozen.fill_(float(comm.rank) + step)
        with sync.averaged():
            inside = model.frozen.tolist()
        sync.finish()
        return inside, model.frozen.tolist()

    assert offbeat.simulate(worker, 3) == [([r + 1.0] * 2, [r + 1.0] * 2) for r in range(3)]


def test_halves_are_summed_wide() -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16; 259 in float32."""

    def worker(comm: offbeat.Communicator) -> float:
        model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))})
        sync = part_averages(model, comm)
        sync.step(lambda: nudged(model, 256.0 if comm.rank == 0 else 1.0))
        return model["x"].item()

    exact = torch.tensor(259 / 4).bfloat16().item()
    assert exact != 64.0
    assert offbeat.simulate(worker, 4) == [exact] * 4


def test_gradients_are_averaged_in_place() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        model = Zoo(seed=0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        sync = offbeat.ddp(model, optimizer, group=comm)
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0 * comm.rank + 1)
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        sync.step(lambda: None)
        for name, p in model.named_parameters():
            assert p.grad.data_ptr() == places[name]
            mean = 2.0 * comm.rank + 1 if name == "frozen" else 2.0
            assert torch.equal(p.grad, torch.full_like(p, mean))

    offbeat.simulate(worker, 2)


class Hoarding(Reducer):
    """A user's own: half of a payload is kept for the next round."""

    def __init__(self, remembers: bool) -> None:
        self._remembers = remembers

    @property
    def remembers(self) -> bool:
        return self._remembers

    def init(self) -> dict[str, Any]:
        return {"kept": None}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: dict[str, Any]) -> Any:
        own = payload.cut(2)[0]
        for i, view in enumerate(own.views):
            kept = 0.0 if state["kept"] is None else state["kept"][i]
            view.div_(2)
            state.setdefault("now", {})[i] = view.clone()
            view.add_(kept)
        state["kept"] = state.pop("now")
        return comm.mean(payload.flats).then(lambda _: payload)


@pytest.mark.parametrize("remembers", [True, False])
def test_what_a_users_reducer_kept_is_not_forgotten(remembers: bool) -> None:
    """Weight 0 has a gradient in the first step only; half of it arrives in the second, if that is told."""

    def worker(comm: Communicator) -> list[float | None]:
        model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = Exchange(grads(model), when=Every(1), among=comm, reduce=Hoarding(remembers))
        sync = Synchronizer(optimizer, [exchange])
        seen = []
        for step in range(3):
            (model[1] + (8.0 * model[0] if step == 0 else 0.0)).backward()
            sync.step()
            seen.append(None if model[0].grad is None else model[0].grad.item())
            optimizer.zero_grad()
        return seen

    assert offbeat.simulate(worker, 2) == [[4.0, 4.0 if remembers else None, None]] * 2
