"""A small Llama trained by transformers' Trainer, whose workers rarely communicate.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

Any method of Offbeat may follow, and "ddp" trains with the Trainer's own DDP instead. Nothing is downloaded.
"""

import argparse
import tempfile
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from offbeat.integrations.transformers import OffbeatTrainer

WORDS, LENGTH = 64, 32


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Each counts on from a random number, in steps of a random size."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, size = torch.randint(WORDS, (1,), generator=draw), torch.randint(1, 9, (1,), generator=draw)
        ids = (start + size * torch.arange(LENGTH)) % WORDS
        found.append({"input_ids": ids, "labels": ids})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", nargs="?", default="diloco(every=16)")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    parser.add_argument("--output", default=tempfile.gettempdir() + "/offbeat-trainer")
    options = parser.parse_args()
    transformers.set_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=WORDS, num_attention_heads=4, max_position_embeddings=LENGTH, **sizes)
    args = TrainingArguments(
        options.output,
        use_cpu=not torch.cuda.is_available(),
        average_tokens_across_devices=False,  # or workers would meet at every step
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=options.steps // 2,
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_strategy="steps" if options.resume else "no",
        save_steps=options.steps // 2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = {"train_dataset": sequences(512, seed=1), "eval_dataset": sequences(64, seed=2)}
    model = LlamaForCausalLM(config)
    if options.method == "ddp":
        trainer = Trainer(model, args, **data)
    else:
        trainer = OffbeatTrainer(model, args, method=options.method, **data)
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=options.resume or None)
    seconds = time.perf_counter() - began
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{options.method}: held-out loss {loss:.3f} after {options.steps} steps in {seconds:.2f} s")
    trainer.accelerator.end_training()  # or the process may be aborted while it closes its connections


if __name__ == "__main__":
    main()
