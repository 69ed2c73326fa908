"""The Trainer of Lightning with Birder instead of AdamW: three lines, marked below, change.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

import argparse
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import thinwire.integrations.lightning  # <--

FEATURES, CLASSES, BATCH = 32, 10, 128


class Classifier(lightning.LightningModule):
    """Learns the labels that a fixed random network gives."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        if self.global_rank == 0 and (batch_idx % 50 == 0 or batch_idx == self.steps - 1):
            print(f"step {batch_idx:4d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> Any:
        """Birder, with a cosine schedule."""
        optimizer = thinwire.Birder(self.parameters(), lr=1e-3)  # <-- instead of torch.optim.AdamW
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(examples: int) -> TensorDataset:
    """Random inputs, and the labels of the fixed network."""
    torch.manual_seed(0)
    labels_of = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).requires_grad_(False)
    inputs = torch.randn(examples, FEATURES)
    return TensorDataset(inputs, labels_of(inputs).argmax(dim=1))


def main() -> None:
    """Train, and print how many bytes were sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    model = Classifier(steps)
    trainer = lightning.Trainer(
        strategy=thinwire.integrations.lightning.ThinwireStrategy(),  # <-- instead of "ddp"
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data(2 * BATCH * steps), batch_size=BATCH))

    if trainer.is_global_zero:
        sent = trainer.optimizers[0].metrics().bytes_sent / steps  # type: ignore[attr-defined]
        dense = 4 * sum(p.numel() for p in model.parameters())
        print(f"sent {sent:,.0f} bytes per step; an all-reduce of fp32 gradients between two ranks sends {dense:,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
