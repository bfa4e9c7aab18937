"""Lightning's Trainer and Fabric with Offbeat: what DDP and a loop by hand give, and silence in between."""

from __future__ import annotations

import inspect
import os
import signal
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import frameworks
import pytest
import torch
import warm

import offbeat

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(frameworks.GROUP)]


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Lightning and of what it imports
        import lightning_runs
    return lightning_runs


def test_a_run_equals_that_with_ddp(runs: ModuleType) -> None:
    """With accumulation, clipping, a schedule, an odd last batch and mixed precision; also under Fabric."""
    results = runs.run(runs.laws)
    for name, (theirs, ours) in results[0].items():
        tolerance = 1e-2 if "bf16" in name else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=name)
        assert torch.equal(ours, results[1][name][1]), f"{name}: replicas differ"
        assert not torch.equal(ours, runs.weights(runs.Regression()))


def test_a_run_equals_a_loop_by_hand(runs: ModuleType) -> None:
    """Bit by bit, also for methods that step in place of the optimizer, need the loss or repeat a step."""
    for found in runs.run(runs.by_hand):
        assert [name for name, (trainer, loop) in found.items() if not torch.equal(trainer, loop)] == []


def test_workers_meet_in_rounds_and_validation_only(runs: ModuleType) -> None:
    first, second = runs.run(runs.rounds)
    equal = [torch.equal(*pair) for pair in zip(first["live"], second["live"], strict=True)]
    assert equal == [step % 3 == 0 for step in range(1, 13)]
    assert first["broadcasts"] == second["broadcasts"] == [0] * 12
    # The sanity check, and a validation after every fourth batch: two or four batches each.
    for shown, other in zip(first["shown"], second["shown"], strict=True):
        assert torch.equal(shown, other)
    mean = (first["live"][3] + second["live"][3]) / 2
    torch.testing.assert_close(first["shown"][2], mean)
    assert not torch.equal(first["live"][3], mean)
    assert first["restored"] == second["restored"] == [True] * 3
    assert torch.equal(first["final"], second["final"])
    assert first["totals"].rounds == 4
    assert first["metrics"]["offbeat/step"] == 10
    assert first["metrics"]["offbeat/round"] in (2, 3), "the report of the third may be on its way"
    assert first["metrics"]["offbeat/workers"] == 2


@pytest.mark.parametrize("step", [7, 8], ids=["within an epoch", "at the end of an epoch"])
def test_a_killed_run_resumes_bit_by_bit(runs: ModuleType, tmp_path: Path, step: int) -> None:
    assert runs.run(runs.training, tmp_path, None, step) == [9, 9]
    whole = runs.run(runs.training, tmp_path / "whole", None, None, step)
    resumed = runs.run(runs.training, tmp_path, step, None)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(ours, theirs)
    saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
    files = sorted((tmp_path / f"step={step}.ckpt.offbeat" / f"step-{step}").iterdir())
    first, second = (torch.load(file, weights_only=True)["model"] for file in files)
    assert saved.keys() == first.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_two_processes_are_started_by_the_trainer(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From this process, with checkpoints of which one is kept and one is a link, which another replaces."""

    def fit(model: Any, last: Any, **options: Any) -> set[str]:
        strategy = runs.OffbeatStrategy("local_sgd(every=5)", start_method="fork")
        save = runs.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_last=last)
        runs.fit(strategy, save, model=model, **options)
        assert strategy.sync is None, "it is in the processes that were started"
        return {path.name for path in tmp_path.iterdir()}

    model, again, longer, one, other = (runs.Regression() for _ in range(5))
    last = str(tmp_path / "last.ckpt")
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fit(model, "link") == {"last.ckpt", "step=12.ckpt", "step=12.ckpt.offbeat"}
        fit(again, "link", ckpt_path=last)
        saved = torch.load(tmp_path / "step=12.ckpt", weights_only=True)["state_dict"]
        kept = {f"{name}.ckpt{files}" for name in ("last", "step=16") for files in ("", ".offbeat")}
        assert fit(longer, True, ckpt_path=last, max_epochs=4) == kept
        assert not Path(last).is_symlink()
        for path, resumed in ((last, one), (str(tmp_path / "step=16.ckpt"), other)):
            fit(resumed, False, ckpt_path=path, max_epochs=5, max_steps=18)
    assert torch.equal(runs.weights(model), runs.weights(again)), "nothing was left to do but to finish"
    assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), runs.weights(model))
    assert torch.equal(runs.weights(one), runs.weights(other)), "both are of step 16"
    assert not torch.equal(runs.weights(one), runs.weights(longer))


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_sigterm_stops_all_workers(runs: ModuleType, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    workers = runs.Workers(runs.until_stopped, tmp_path)
    deadline = time.monotonic() + runs.PATIENCE
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        os.kill(workers.processes[rank].pid, signal.SIGTERM)
    results = workers.results()
    for rank, result in enumerate(results):
        assert isinstance(result, SIGTERMException if rank in ranks else offbeat.PeerLost), repr(result)
    assert {path.name for path in tmp_path.iterdir()} == {"ready-0", "ready-1", "stopped.ckpt"}


def test_wrong_use_gets_one_sentence_on_every_rank(runs: ModuleType) -> None:
    first, second = runs.run(runs.errors)
    assert first == second
    for name, (_, sentence) in runs.SENTENCES.items():
        assert first.get(name, "no error").startswith(sentence), name


def test_names_that_lightning_may_move(runs: ModuleType) -> None:
    """Private ones, and the order in which they are used."""
    import lightning
    from lightning.fabric import Fabric
    from lightning.fabric.utilities import seed
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint, Timer
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
    from packaging.version import Version

    def uses(function: object, *words: str) -> None:
        source = inspect.getsource(function)
        places = [source.index(word) for word in words]
        assert places == sorted(places)

    if Version(lightning.__version__) >= Version("2.5.2"):
        uses(_TrainingEpochLoop.advance, "self._broadcast_sigterm_tensor()", "next(data_fetcher)")
    uses(_SignalConnector.register_signal_handlers, "self._sigterm_notifier_fn")
    uses(_SignalConnector._sigterm_notifier_fn, "launcher.kill(signum)", "self.received_sigterm = True")
    uses(Trainer._run, "self.strategy.setup(self)", "restore_training_state()", "register_signal_handlers()")
    uses(DDPStrategy.setup, "_layer_sync", "self.configure_ddp()", "self.setup_optimizers(trainer)")
    uses(Fabric.no_backward_sync, "self._strategy._backward_sync_control.no_backward_sync(")
    uses(Timer.on_train_batch_end, "self._interval")
    uses(ModelCheckpoint.on_train_batch_end, "self._train_time_interval", "broadcast")
    assert seed._collect_rng_states().keys() >= {"torch", "python"}


def test_every_method_without_arguments_has_a_name(runs: ModuleType) -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    assert isinstance(StrategyRegistry.get("offbeat_diloco"), runs.OffbeatStrategy)
    assert isinstance(STRATEGY_REGISTRY.get("offbeat_diloco"), runs.OffbeatFabricStrategy)
    named = {name.removeprefix("offbeat_") for name in StrategyRegistry if name.startswith("offbeat_")}
    needy = set(offbeat.methods.__all__) - named
    assert {"local_sgd", "diloco", "ddp"} <= named
    for name in needy:
        with pytest.raises(ValueError, match=f"{name} needs "):
            offbeat.method(name)


def test_without_lightning_the_extra_is_named() -> None:
    hidden = "import sys\nfor name in 'lightning', 'lightning_fabric': sys.modules[name] = None\n"
    done = warm.run("-c", hidden + "import offbeat.integrations.lightning")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: offbeat.integrations.lightning needs Lightning: pip install -c constraints.txt "
        "'.[lightning]' in Offbeat's folder."
    )


def test_the_older_name_of_the_package() -> None:
    script = """
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
from offbeat.integrations.lightning import OffbeatStrategy
trainer = pl.Trainer(strategy="offbeat_slowmo", accelerator="cpu", devices=2, logger=False)
print(type(trainer.strategy) is OffbeatStrategy, trainer.strategy.method)
"""
    assert warm.run("-c", script).stdout == "True slowmo()\n"


@pytest.mark.parametrize("workers", [2, 1], ids=["torchrun", "python"])
def test_the_example_runs_quietly(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    example = "examples/lightning_strategy.py"
    done = frameworks.torchrun(2, example) if workers == 2 else frameworks.alone(example)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("diloco(every=16): accuracy 0.")
    assert done.stderr == ""
