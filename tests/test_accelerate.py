"""LocalSGD in place of accelerate's: equal to it and to DDP, exact when resumed, silent between rounds."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import frameworks
import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(frameworks.GROUP)]
SCRIPT = str(Path(__file__))


def quietly(local_sgd: Any) -> None:
    pass


class Run:
    """Model, optimizer, scheduler and loader of a script for accelerate, and its loop."""

    def __init__(
        self, *, adam: bool = False, accumulate: int = 1, wrap: bool = True, seed: int = 0, **config: Any
    ) -> None:
        from accelerate import Accelerator, DataLoaderConfiguration

        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(**config),
        )
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1 if adam else 0.0), nn.Linear(8, 1))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if not adam:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(26, 3, generator=draw)  # no batch divides it
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=draw)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        prepare = self.accelerator.prepare
        self.model = prepare(model) if wrap else self.accelerator.prepare_model(model, evaluation_mode=True)
        self.optimizer, self.loader, self.scheduler = prepare(optimizer, loader, scheduler)

    def train(self, rounds: Any, *, epochs: int = 3, clip: float = 0.0, each: Any = quietly) -> Any:
        torch.manual_seed(100 + self.accelerator.process_index)  # for the dropout
        with rounds as local_sgd:
            for _ in range(epochs):
                for x, y in self.loader:
                    with self.accelerator.accumulate(self.model):
                        self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                        if clip and self.accelerator.sync_gradients:
                            self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
                        if local_sgd is not None:
                            local_sgd.step()
                            each(local_sgd)
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


LAWS: dict[str, dict[str, Any]] = {
    "local_sgd(every=1)": {"accumulate": 3},
    "ddp()": {"accumulate": 3, "adam": True, "clip": 0.2},
    "ssd_sgd(every=2, warmup=100)": {"accumulate": 2},
    "accelerate's own": {},
}


def laws(folder: str) -> dict[str, Any]:
    """The weights of runs of other implementations, and of ours: wrapped in DDP, and not wrapped."""
    from accelerate.local_sgd import LocalSGD

    from offbeat.integrations import accelerate as ours

    found = {}
    for method, options in LAWS.items():
        clip, rank = options.pop("clip", 0.0), int(os.environ["RANK"])
        runs = [Run(**options), Run(**options), Run(**options, wrap=False, seed=rank)]
        arguments: dict[str, Any] = {"method": method}
        theirs: Any = nullcontext()
        if method == "accelerate's own":
            arguments = {"local_sgd_steps": 3}
            theirs = LocalSGD(accelerator=runs[0].accelerator, model=runs[0].model, **arguments)
        rounds = [ours.LocalSGD(accelerator=r.accelerator, model=r.model, **arguments) for r in runs[1:]]
        found[method] = [
            run.train(each, clip=clip) for run, each in zip(runs, [theirs, *rounds], strict=True)
        ]
    return {"start": Run().weights(), **found}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accelerate")
    return frameworks.gather(2, folder, SCRIPT, "solo,laws,drift,resume,misuse,page")


@pytest.mark.parametrize("method", LAWS)
def test_a_run_equals_that_of_ddp_and_of_accelerate(runs: list[dict[str, Any]], method: str) -> None:
    for rank in runs:
        theirs, *ours = rank["laws"][method]
        assert (theirs["0.weight"] - rank["laws"]["start"]["0.weight"]).abs().max() > 0.01
        for weights in ours:
            torch.testing.assert_close(weights, theirs, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(weights, runs[0]["laws"][method][1], rtol=0, atol=1e-6)


def drift(folder: str) -> dict[str, Any]:
    """The weights after every update, of `local_sgd_steps` updates of two batches each."""
    from offbeat.integrations.accelerate import LocalSGD

    found: list[dict[str, Tensor]] = []
    run = Run(accumulate=2)
    rounds = LocalSGD(run.accelerator, run.model, 3)

    def note(local_sgd: Any) -> None:
        if run.accelerator.sync_gradients:
            found.append(run.weights())

    found.append(run.train(rounds, epochs=1, each=note))
    off = LocalSGD(run.accelerator, run.model, 3, enabled=False)
    with off:
        off.step()
    return {"after": found, "off": off.sync is None}


def test_replicas_drift_and_are_equal_to_the_bit_after_a_round(runs: list[dict[str, Any]]) -> None:
    first, second = (rank["drift"]["after"] for rank in runs)
    equal = [torch.equal(a["0.weight"], b["0.weight"]) for a, b in zip(first, second, strict=True)]
    assert equal == [False, False, True, False, True]  # four updates, and the end
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)
    assert runs[0]["drift"]["off"]


def resume(folder: str) -> dict[str, Any]:
    """One run that saves its sixth step, in its second epoch, and one that continues from there."""
    from accelerate import skip_first_batches

    from offbeat.integrations.accelerate import LocalSGD

    def train(load: bool) -> dict[str, Tensor]:
        run = Run(adam=True, accumulate=2, use_seedable_sampler=True, data_seed=0)
        torch.manual_seed(run.accelerator.process_index)  # for the dropout
        with LocalSGD(run.accelerator, run.model, method="eager_diloco(every=2)") as local_sgd:
            sync = local_sgd.sync
            assert sync is not None
            assert not load or sync.load(folder, scheduler=run.scheduler)
            first, done = divmod(sync.steps, math.ceil(len(run.loader) / 2))
            for epoch in range(first, 3):
                run.loader.set_epoch(epoch)
                for x, y in skip_first_batches(run.loader, done * 2) if epoch == first else run.loader:
                    with run.accelerator.accumulate(run.model):
                        run.accelerator.backward(nn.functional.mse_loss(run.model(x), y))
                        run.optimizer.step()
                        run.scheduler.step()
                        run.optimizer.zero_grad()
                        local_sgd.step()
                    if sync.steps == 6 and run.accelerator.sync_gradients and not load:
                        sync.save(folder, scheduler=run.scheduler)
        rates = torch.tensor(run.scheduler.get_last_lr())
        return {**run.weights(), "lr": rates, "place": torch.tensor([first, done, sync.steps])}

    return {"whole": train(False), "resumed": train(True)}


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        whole, resumed = rank["resume"]["whole"], rank["resume"]["resumed"]
        assert (whole.pop("place").tolist(), resumed.pop("place").tolist()) == ([0, 0, 12], [1, 2, 12])
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def solo(folder: str) -> tuple[str, str]:
    """Without a process group and without accelerators, each process is alone."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from offbeat.integrations.accelerate import LocalSGD

    found = frameworks.refused(lambda: LocalSGD(Accelerator(), nn.Linear(1, 1), 3))
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


def misuse(folder: str) -> dict[str, tuple[str, str]]:
    from offbeat.integrations.accelerate import LocalSGD

    def train(change: Callable[[Run], Any], **options: Any) -> Callable[[], Any]:
        def run() -> None:
            own = Run()
            change(own)
            own.train(LocalSGD(own.accelerator, own.model, **options), epochs=1)

        return run

    def swap(run: Run) -> None:
        """The script steps the optimizer that was not prepared."""
        run.optimizer = run.optimizer.optimizer

    def lbfgs(run: Run) -> None:
        run.optimizer.optimizer = torch.optim.LBFGS(run.model.parameters())

    def forget(run: Run) -> None:
        run.accelerator._optimizers.clear()

    def twice(run: Run) -> None:
        vars(run.scheduler)["step"] = lambda: run.optimizer.step()

    def scale(run: Run) -> None:
        run.optimizer.scaler = torch.amp.GradScaler("cpu")

    def fsdp(run: Run) -> None:
        os.environ["ACCELERATE_USE_FSDP"] = "true"

    def nothing(run: Run) -> None:
        pass

    cases = {
        "both": train(nothing, local_sgd_steps=3, method="ddp()"),
        "neither": train(nothing),
        "steps": train(nothing, local_sgd_steps=0),
        "unprepared": train(forget, local_sgd_steps=3),
        "swapped": train(swap, local_sgd_steps=3),
        "twice": train(twice, local_sgd_steps=3),
        "lbfgs": train(lbfgs, local_sgd_steps=3),
        "fp16": train(scale, method="ssd_sgd(every=2)"),
        "fsdp": train(fsdp, local_sgd_steps=3),
    }
    found = {}
    for name, case in cases.items():
        found[name] = frameworks.refused(case)
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    return found


REFUSED = {
    "both": ("ValueError", "LocalSGD(local_sgd_steps=3, method='ddp()'): pass one of the two."),
    "neither": ("ValueError", "LocalSGD(local_sgd_steps=None, method=None): pass one of the two."),
    "steps": ("ValueError", "Every(steps=0): steps must be at least 1."),
    "unprepared": (
        "ValueError",
        "LocalSGD: no optimizer trains this model: pass it to accelerator.prepare().",
    ),
    "swapped": (
        "RuntimeError",
        "LocalSGD.step(): no optimizer has stepped: first call step() of the optimizer that "
        "accelerator.prepare() returned.",
    ),
    "twice": ("RuntimeError", "LocalSGD: call its step() after every optimizer.step()."),
    "lbfgs": ("ValueError", "LBFGS computes the loss several times in one step: use another optimizer."),
    "fp16": ("ValueError", "ssd_sgd(every=2) makes the step itself, which fp16 may have to skip: use bf16."),
    "fsdp": ("ValueError", "LocalSGD with FSDP: both distribute the model; switch off FSDP."),
    "solo": (
        "ValueError",
        "LocalSGD: 2 processes were launched, but accelerate sees no accelerator, so that each would train "
        "alone: pass Accelerator(cpu=True) to train on CPUs.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_one_sentence_on_every_rank(runs: list[dict[str, Any]], case: str) -> None:
    assert [({"solo": rank["solo"]} | rank["misuse"])[case] for rank in runs] == [REFUSED[case]] * 2


def test_every_refusal_is_tested(runs: list[dict[str, Any]]) -> None:
    assert {"solo"} | runs[0]["misuse"].keys() == REFUSED.keys()


def page(folder: str) -> list[str]:
    """Run the blocks of the page, with what they take for granted."""
    from test_docs import BLOCK, prepared

    text = (frameworks.ROOT / "docs/accelerate.md").read_text()
    blocks = [match["code"] for match in BLOCK.finditer(text)]
    os.chdir(folder)
    ends = []
    for code in blocks:
        space = prepared(int(os.environ["RANK"]))
        exec(compile(code, "docs/accelerate.md", "exec"), space)
        ends.append({name: value.clone() for name, value in space["model"].state_dict().items()})
    return ends


def test_the_page_leaves_equal_models(runs: list[dict[str, Any]]) -> None:
    assert len(runs[0]["page"]) >= 1
    for first, second in zip(runs[0]["page"], runs[1]["page"], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_runs_quietly(workers: int) -> None:
    example = "examples/accelerate_local_sgd.py"
    done = frameworks.torchrun(2, example) if workers == 2 else frameworks.alone(example)
    assert done.returncode == 0, done.stderr
    assert "local_sgd(every=16): loss 1.0" in done.stdout
    assert ("MB sent" in done.stdout) == (workers == 2)
    assert done.stderr == ""


if __name__ == "__main__":
    frameworks.report(sys.argv[2], {name: globals()[name](sys.argv[2]) for name in sys.argv[1].split(",")})
