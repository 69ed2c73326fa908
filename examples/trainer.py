"""The Trainer of Transformers with Birder instead of AdamW: three lines, marked below, change.

torchrun --nproc-per-node 2 examples/trainer.py
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire  # <--
from thinwire.integrations.transformers import ThinwireCallback  # <--

TOKENS, CONTEXT = 64, 16


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from a random token, by a random step."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = (index % TOKENS + (1 + index // TOKENS % 3) * torch.arange(CONTEXT)) % TOKENS
        return {"input_ids": sequence, "labels": sequence}


def main() -> None:
    """Train a tiny random model, and print the losses and the bytes that were sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", default="trainer-output")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the directory")
    options = parser.parse_args()

    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": TOKENS, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        options.directory,
        learning_rate=3e-3,
        weight_decay=0.01,
        per_device_train_batch_size=16,
        max_steps=options.steps,
        logging_steps=10,
        save_steps=options.steps // 2,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Counting())
    trainer.add_callback(ThinwireCallback(trainer, thinwire.Birder))  # <--
    trainer.train(resume_from_checkpoint=options.resume)

    if trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        for entry in logs:
            print(f"step {entry['step']:4d}  loss {entry['loss']:.3f}")
        steps = logs[-1]["thinwire/steps"]
        dense = 4 * sum(p.numel() for p in model.parameters())
        sent = logs[-1]["thinwire/bytes_sent"] / steps
        print(f"sent {sent:,.0f} bytes per step; an all-reduce of fp32 gradients between two ranks sends {dense:,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
