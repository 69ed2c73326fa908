"""Accelerate with Birder instead of AdamW: three lines, marked below, change. Saves, and resumes exactly.

torchrun --nproc-per-node 2 examples/accelerated.py
"""

import argparse
import hashlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import thinwire.integrations.accelerate  # <--

FEATURES, CLASSES, BATCH, MICROBATCHES = 32, 10, 64, 2


def data(examples: int) -> TensorDataset:
    """Random inputs, and the labels that a fixed random network gives."""
    torch.manual_seed(0)
    labels_of = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).requires_grad_(False)
    inputs = torch.randn(examples, FEATURES)
    return TensorDataset(inputs, labels_of(inputs).argmax(dim=1))


def digest(model: nn.Module) -> str:
    """The first digits of a hash of all parameters."""
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(values).hexdigest()[:16]


def main() -> None:
    """Train, save on the way, and print a hash of the parameters at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", default="accelerated-output")
    parser.add_argument("--resume", action="store_true", help="continue from the state in the directory")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)
    examples = data(2 * BATCH * MICROBATCHES * options.steps)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, CLASSES))
    optimizer = thinwire.Birder(model.parameters(), lr=1e-3, clip_norm=1.0)  # <-- instead of torch.optim.AdamW
    thinwire.integrations.accelerate.attach(accelerator, model, optimizer)  # <--
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * options.steps)
    loader = DataLoader(examples, batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    first, saved_at = 0, MICROBATCHES * options.steps // 2 + 1  # in the middle of an accumulation
    if options.resume:
        accelerator.load_state(options.directory)
        first = saved_at
    for batch, (inputs, labels) in enumerate(accelerator.skip_first_batches(loader, first), start=first):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if batch + 1 == saved_at and not options.resume:
            accelerator.save_state(options.directory)
        if batch % 40 == 0 or batch + 1 == len(loader):
            accelerator.print(f"step {batch // MICROBATCHES:4d}  loss {loss.item():.3f}")
    accelerator.print(f"parameters {digest(model)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
