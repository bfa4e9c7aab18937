"""The Trainer of transformers with Offbeat: equal to its DDP, exact when resumed, silent between rounds."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import frameworks
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(frameworks.GROUP)]
SCRIPT = str(Path(__file__))
EXACT = "eager_diloco(every=3)"  # a message is in flight from the third step on


def network(seed: int = 0, dropout: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": 23, "n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def sentences(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Predictable sequences, some of them with labels that do not count."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        ids = (torch.randint(23, (1,), generator=draw) + torch.arange(8) * 3) % 23
        labels = ids.clone()
        labels[: i % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    options = {
        "use_cpu": True,
        "average_tokens_across_devices": False,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        **options,
    }
    return TrainingArguments(folder, **options)


def trainer(kind: Any, args: Any, *, model: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """A trainer of this kind on the same data, on 26 sequences that no batch divides."""
    model = network() if model is None else model
    data = {"train_dataset": sentences(26), "eval_dataset": sentences(6, seed=2)}
    return kind(model, args, callbacks=list(callbacks), **{**data, **options})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# The laws.

LAWS: dict[str, dict[str, Any]] = {
    "local_sgd(every=1)": {"max_grad_norm": 0, "optim": "sgd", "gradient_accumulation_steps": 3},
    "ddp()": {"max_grad_norm": 0.2, "gradient_accumulation_steps": 3, "learning_rate": 0.01},  # AdamW
    "ssd_sgd(every=2, warmup=100)": {"max_grad_norm": 0, "optim": "sgd", "gradient_accumulation_steps": 2},
}


def compare_with_ddp(folder: str) -> dict[str, Any]:
    """The weights of each method, and of the Trainer with its own DDP, after three epochs with a schedule."""
    from transformers import Trainer

    from offbeat.integrations.transformers import OffbeatTrainer

    found = {}
    for method, options in LAWS.items():
        args = arguments(folder, num_train_epochs=3, lr_scheduler_type="cosine", **options)
        theirs = trainer(Trainer, args)
        ours = trainer(OffbeatTrainer, args, model=network(seed=args.process_index), method=method)
        outputs = [each.train() for each in (theirs, ours)]
        assert ours.model_wrapped is ours.model
        assert theirs.model_wrapped is not theirs.model
        found[method] = {
            "start": weights(network()),
            "weights": [weights(theirs.model), weights(ours.model)],
            "loss": [output.training_loss for output in outputs],
            "steps": [each.state.global_step for each in (theirs, ours)] + [ours.sync.steps],
        }
    return found


@pytest.mark.parametrize("method", LAWS)
def test_a_run_equals_that_of_ddp(laws: list[dict[str, Any]], method: str) -> None:
    """With accumulation, clipping, a schedule, and a last update of fewer batches."""
    first = laws[0][method]
    assert first["steps"][0] == first["steps"][1] == first["steps"][2] >= 6
    for rank in laws:
        theirs, ours = rank[method]["weights"]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, first["weights"][1], rtol=0, atol=0)
        assert rank[method]["loss"][0] == pytest.approx(rank[method]["loss"][1], rel=1e-5)
    name = "transformer.wte.weight"
    assert (first["weights"][0][name] - first["start"][name]).abs().max() > 0.01


# Runs that drift.


def watch(folder: str) -> dict[str, Any]:
    """Everything about runs that drift: weights after each step, evaluation, saved models, logs, the end."""
    from transformers import TrainerCallback

    from offbeat.integrations.transformers import OffbeatTrainer

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.after: list[Any] = []

        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            self.after.append(weights(model))

        def on_train_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            self.after.append(weights(model))

    class Shown(OffbeatTrainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.shown.append(weights(self.model))
            return super().evaluation_loop(*args, **kwargs)

    found: dict[str, Any] = {}
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    settings: dict[str, Any] = {
        "local_sgd(every=3)": {"logging_strategy": "steps", "logging_steps": 4},
        "local_sgd(every=3, delay=2)": best,
    }
    for method, options in settings.items():
        watched, place = Watch(), f"{folder}/{len(found)}"
        args = arguments(place, max_steps=8, **often, **options)
        run = trainer(Shown, args, callbacks=[watched], method=method)
        if len(found) == 1:
            run.eval_dataset = {"first": sentences(4, seed=3), "second": sentences(6, seed=2)}
            run.args.metric_for_best_model = "first_loss"
        run.shown = []
        output = run.train()
        found[method] = {
            "after": watched.after,
            "shown": run.shown,
            "folder": place,
            "history": list(run.state.log_history),
            "metrics": output.metrics,
            "best": run.state.best_model_checkpoint,
            "final": weights(run.model),
            "own": run.evaluate(),
        }
    return found


def mean(states: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def saved(checkpoint: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{checkpoint}/model.safetensors")


def close(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor], **limits: float) -> None:
    shared = some.keys() & others.keys()  # tied weights are saved once
    assert len(shared) > 10
    torch.testing.assert_close({n: some[n] for n in shared}, {n: others[n] for n in shared}, **limits)


EXACTLY = {"rtol": 0.0, "atol": 0.0}


def test_replicas_drift_and_are_equal_to_the_bit_after_a_round(runs: list[dict[str, Any]]) -> None:
    first, second = (rank["watch"]["local_sgd(every=3)"]["after"] for rank in runs)
    name = "transformer.wte.weight"
    equal = [torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True)]
    assert equal == [False, False, True, False, False, True, False, False, True]  # the last: on_train_end
    for step in (2, 5, 8):
        close(first[step], second[step], **EXACTLY)


def test_evaluation_and_saved_models_show_the_consensus(runs: list[dict[str, Any]]) -> None:
    found = [rank["watch"]["local_sgd(every=3)"] for rank in runs]
    for index, step in enumerate((2, 4, 6, 8)):
        expected = mean([rank["after"][step - 1] for rank in found])
        for rank in found:
            close(rank["shown"][index], expected)
        close(saved(f"{found[0]['folder']}/checkpoint-{step}"), found[0]["shown"][index], **EXACTLY)
    losses = [[entry["eval_loss"] for entry in rank["history"] if "eval_loss" in entry] for rank in found]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    assert found[0]["own"]["eval_loss"] == losses[0][-1]  # of the model that is left in the end
    assert "epoch" in found[0]["own"]


def test_logs_carry_the_metrics(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        found = rank["watch"]["local_sgd(every=3)"]
        logs = [entry for entry in found["history"] if "loss" in entry]
        assert [entry["offbeat/step"] for entry in logs] == [4.0, 8.0]
        assert 0 < logs[0]["offbeat/bytes_sent_total"] < logs[1]["offbeat/bytes_sent_total"]
        assert found["metrics"]["offbeat/workers"] == 2.0
        assert not any(name.startswith("offbeat") for name in found["own"])


def test_the_best_model_is_what_is_left(runs: list[dict[str, Any]]) -> None:
    """The loss falls, so the worst model is the first; a message is in flight when it is loaded."""
    found = [rank["watch"]["local_sgd(every=3, delay=2)"] for rank in runs]
    assert Path(found[0]["best"]).name == "checkpoint-2"
    for rank in found:
        close(rank["final"], saved(found[0]["best"]), **EXACTLY)
        assert not torch.equal(rank["after"][-1]["lm_head.weight"], rank["after"][-2]["lm_head.weight"])
        assert len(rank["shown"]) == 8 + 2  # two sets of data


# Saving and resuming.


def exact(folder: str, steps: int, callbacks: Any = (), **options: Any) -> Any:
    """A run with dropout, momentum, accumulation and messages in flight."""
    from offbeat.integrations.transformers import OffbeatTrainer

    options = {"max_steps": steps, "learning_rate": 0.01, "gradient_accumulation_steps": 2, **options}
    args = arguments(folder, save_strategy="steps", save_steps=1, lr_scheduler_type="cosine", **options)
    return trainer(OffbeatTrainer, args, model=network(dropout=0.2), callbacks=callbacks, method=EXACT)


def killed(folder: str) -> None:
    """Train until step 5 is saved; then every process kills itself."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    exact(f"{folder}/killed", 9, [Kill()]).train()


def resume(folder: str) -> dict[str, Any]:
    """Continue where the processes were killed, and elsewhere; and train without an interruption."""
    whole = exact(f"{folder}/whole", 9)
    whole.train()
    found = {"whole": weights(whole.model)}
    Path(f"{folder}/killed/checkpoint-6").mkdir(exist_ok=True)  # of a save that was cut short
    for place, checkpoint in {
        "killed": True,
        "in flight": f"{folder}/whole/checkpoint-4",
        "at the end": f"{folder}/whole/checkpoint-9",
    }.items():
        run = exact(f"{folder}/{place}", 9)
        run.train(resume_from_checkpoint=checkpoint)
        found[place] = weights(run.model)
    return {**found, **lose_files(folder)}


def lose_files(folder: str) -> dict[str, Any]:
    """What is said when a checkpoint lacks the file of rank 1, and when it has no file of Offbeat."""
    import torch.distributed as dist

    found: dict[str, Any] = {}
    for lost in ("rank-1-of-2", "rank-0-of-2"):
        dist.barrier()
        if dist.get_rank() == 0:
            os.remove(f"{folder}/whole/checkpoint-7/offbeat-step-7-{lost}.pt")
        dist.barrier()
        run, said = exact(f"{folder}/lost", 8), _Sentences()
        logging.getLogger("offbeat").addHandler(said)
        resumed = partial(run.train, resume_from_checkpoint=f"{folder}/whole/checkpoint-7")
        found[lost] = frameworks.refused(resumed), said.heard
        logging.getLogger("offbeat").removeHandler(said)
    return found


class _Sentences(logging.Handler):
    """The warnings of Offbeat."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def test_a_checkpoint_without_the_file_of_a_rank_is_refused(runs: list[dict[str, Any]], wreck: Path) -> None:
    place = f"{wreck}/whole/checkpoint-7"
    (error, ignored), (same, quiet) = (rank["resume"]["rank-1-of-2"] for rank in runs)
    sentence = (
        f"{place} has files of Offbeat, but no step of which every rank has one (ranks with a file: [0]): "
        "put back the missing ones, or delete offbeat-step-* to start from its weights."
    )
    assert error == same == ("CheckpointMismatch", sentence)
    assert (len(ignored), quiet) == (1, [])
    assert "because rank 1 has no whole file of it" in ignored[0]
    nothing = [rank["resume"]["rank-0-of-2"] for rank in runs]
    assert [kind for (kind, _), _ in nothing] == ["", ""]
    assert [said for _, said in nothing] == [
        [f"{place} has no files of Offbeat: all workers start from its weights."],
        [],
    ]


@pytest.mark.parametrize("place", ["killed", "in flight", "at the end"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(runs: list[dict[str, Any]], place: str) -> None:
    for rank in runs:
        close(rank["resume"][place], rank["resume"]["whole"], **EXACTLY)


def again(folder: str) -> dict[str, Any]:
    """Train twice with the same trainer; fail on one rank."""
    from offbeat.integrations.transformers import OffbeatTrainer

    class Failing(OffbeatTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2 and self.args.process_index == 1:
                raise RuntimeError("bad batch")
            return super().compute_loss(*args, **kwargs)

    run = trainer(OffbeatTrainer, arguments(folder, max_steps=4), method="local_sgd(every=2)")
    steps = []
    for _ in range(2):
        run.train()
        steps.append((run.state.global_step, run.sync.steps))
    failing = trainer(Failing, arguments(folder, max_steps=5), method="local_sgd(every=3)")
    error = frameworks.refused(failing.train)
    return {"steps": steps, "error": error, "left": "backward" in vars(failing.accelerator)}


def test_a_trainer_trains_again_and_a_failure_is_heard(runs: list[dict[str, Any]]) -> None:
    assert [rank["again"]["steps"] for rank in runs] == [[(4, 4), (4, 4)]] * 2
    assert [rank["again"]["left"] for rank in runs] == [False, False]
    heard, own = (rank["again"]["error"] for rank in runs)
    assert own == ("RuntimeError", "bad batch")
    assert heard[0] == "PeerLost"
    assert heard[1].endswith("rank 1 failed (RuntimeError: bad batch).")


# What is refused.


def clip(folder: str) -> dict[str, Any]:
    """Where a server makes the step, it gets clipped gradients."""
    from offbeat.integrations.transformers import OffbeatTrainer

    args = arguments(folder, max_steps=4, max_grad_norm=1e-3, optim="sgd", lr_scheduler_type="constant")
    run = trainer(OffbeatTrainer, args, method="ssd_sgd(every=1, warmup=100)")
    run.train()
    moved = [
        (a - b).square().sum() for a, b in zip(run.model.parameters(), network().parameters(), strict=True)
    ]
    return {"moved": sum(moved).sqrt().item()}


def test_a_server_gets_clipped_gradients(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert 0.1 * 1e-3 < rank["clip"]["moved"] <= 4 * 0.1 * 1e-3 * 1.001


def solo(folder: str) -> tuple[str, str]:
    """Without a process group and without accelerators, each process is alone."""
    from offbeat.integrations.transformers import OffbeatTrainer

    return frameworks.refused(lambda: trainer(OffbeatTrainer, arguments(folder, use_cpu=False)))


def misuse(folder: str) -> dict[str, tuple[str, str]]:
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer

    from offbeat.integrations.transformers import OffbeatMixin, OffbeatTrainer

    class Mine(OffbeatMixin, Trainer):
        pass

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(sentences(8))

    def build(kind: Any = OffbeatTrainer, **options: Any) -> Callable[[], Any]:
        own = {
            name: options.pop(name)
            for name in ("model", "train_dataset", "optimizers", "method")
            if name in options
        }
        return lambda: trainer(kind, arguments(folder, max_steps=1, **options), **own).train()

    model = network()
    lbfgs = torch.optim.LBFGS(model.parameters())
    cases = {
        "tokens": build(average_tokens_across_devices=True),
        "seen": build(include_num_input_tokens_seen="all"),
        "batch size": build(auto_find_batch_size=True),
        "stream": build(train_dataset=Stream()),
        "method": build(method="diloco(evry=3)"),
        "lbfgs": build(model=model, optimizers=(lbfgs, torch.optim.lr_scheduler.ConstantLR(lbfgs))),
        "ddp": build(model=DistributedDataParallel(network())),
        "fsdp": build(Mine, fsdp="full_shard"),
    }
    found = {name: frameworks.refused(case) for name, case in cases.items()}
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by the last case
    return found


REFUSED = {
    "tokens": (
        "ValueError",
        "TrainingArguments(average_tokens_across_devices=True): workers would gather their numbers of tokens "
        "at every step: pass False.",
    ),
    "seen": (
        "ValueError",
        "TrainingArguments(include_num_input_tokens_seen='all'): workers would gather their numbers of "
        "tokens at every step: pass False.",
    ),
    "batch size": (
        "ValueError",
        "TrainingArguments(auto_find_batch_size=True): a worker that starts again leaves the others waiting: "
        "pass False.",
    ),
    "stream": (
        "ValueError",
        "train_dataset is an IterableDataset, which rank 0 reads and sends to all at every step: pass "
        'TrainingArguments(accelerator_config={"dispatch_batches": False}).',
    ),
    "method": (
        "ValueError",
        "method('diloco(evry=3)'): diloco has no argument 'evry' (did you mean 'every'?); it takes every, "
        "lr, momentum, ramp, warmup, clip, reduce, buffers, moments, drift, guard.",
    ),
    "lbfgs": ("ValueError", "LBFGS computes the loss several times in one step: use another optimizer."),
    "ddp": (
        "TypeError",
        "The model is wrapped in DistributedDataParallel, which averages gradients at every step: train "
        "the model itself, without the wrapper (in Accelerate, prepare_model(model, evaluation_mode=True); "
        "in transformers, OffbeatTrainer; in Lightning, OffbeatStrategy).",
    ),
    "solo": (
        "ValueError",
        "OffbeatTrainer: 2 processes were launched, but accelerate sees no accelerator, so that each would "
        "train alone: pass TrainingArguments(use_cpu=True) to train on CPUs.",
    ),
    "fsdp": ("ValueError", "Mine with FSDP: both distribute the model; switch off FSDP."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_one_sentence_on_every_rank(runs: list[dict[str, Any]], case: str) -> None:
    assert [({"solo": rank["solo"]} | rank["misuse"])[case] for rank in runs] == [REFUSED[case]] * 2


def test_every_refusal_is_tested(runs: list[dict[str, Any]]) -> None:
    assert {"solo"} | runs[0]["misuse"].keys() == REFUSED.keys()


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed when it had saved step 5."""
    folder = tmp_path_factory.mktemp("killed")
    done = frameworks.torchrun(2, SCRIPT, "killed", str(folder))
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr or "-9" in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks = frameworks.gather(4, tmp_path_factory.mktemp("laws"), SCRIPT, "compare_with_ddp")
    return [rank["compare_with_ddp"] for rank in ranks]


@pytest.fixture(scope="module")
def runs(wreck: Path) -> list[dict[str, Any]]:
    """Of two processes that do one after the other what the tests below look at."""
    return frameworks.gather(2, wreck, SCRIPT, "solo,watch,resume,misuse,clip,pins,again")


# The example, imports, and private names.


@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_runs_quietly(workers: int) -> None:
    example = "examples/transformers_trainer.py"
    done = frameworks.torchrun(2, example, "--steps", "8") if workers == 2 else frameworks.alone(example)
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout
    assert done.stderr == ""


MISSING = """
import sys
sys.modules["transformers"] = None
import offbeat
import offbeat.integrations.accelerate
import offbeat.integrations.transformers
"""


def test_without_transformers_it_names_the_extra() -> None:
    for missing in ("transformers", "accelerate"):
        code = MISSING.replace('"transformers"', f'"{missing}"')
        done = frameworks.alone("-c", code)
        assert done.stderr.splitlines()[-1] == (
            f"ImportError: offbeat.integrations.{missing} needs {missing}: pip install -c constraints.txt "
            f"'.[{missing}]' in Offbeat's folder."
        )


def pins(folder: str) -> dict[str, Any]:
    """The names and signatures of transformers and accelerate that nobody promises to keep."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, trainer_callback

    names = ["create_accelerator_and_postprocess", "_save_rng_state", "_load_optimizer_and_scheduler"]
    names += ["_load_best_model", "save_model", "evaluate", "predict", "log"]
    found = {name: list(inspect.signature(getattr(Trainer, name)).parameters) for name in names}
    clips = [inspect.getsource(getattr(Accelerator, f"clip_grad_{kind}_")) for kind in ("norm", "value")]
    return {
        **found,
        "prepare_model": "evaluation_mode" in inspect.signature(Accelerator.prepare_model).parameters,
        "clipping unscales": all("self.unscale_gradients()" in source for source in clips),
        "optimizers": hasattr(Accelerator(cpu=True), "_optimizers"),
        "scaler": "scaler" in inspect.signature(AcceleratedOptimizer).parameters,
        "callbacks": "self.callbacks" in inspect.getsource(trainer_callback.CallbackHandler.__init__),
    }


def test_the_private_names_are_where_they_were(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["pins"] == {
        "create_accelerator_and_postprocess": ["self"],
        "_save_rng_state": ["self", "output_dir"],
        "_load_optimizer_and_scheduler": ["self", "checkpoint"],
        "_load_best_model": ["self"],
        "save_model": ["self", "output_dir", "_internal_call"],
        "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
        "predict": ["self", "test_dataset", "ignore_keys", "metric_key_prefix"],
        "log": ["self", "logs", "start_time"],
        "prepare_model": True,
        "clipping unscales": True,
        "optimizers": True,
        "scaler": True,
        "callbacks": True,
    }


if __name__ == "__main__":
    frameworks.report(sys.argv[2], {name: globals()[name](sys.argv[2]) for name in sys.argv[1].split(",")})
