"""DistributedDataParallel with Birder instead of AdamW: three lines change, the training loop does not.

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

FEATURES, CLASSES, BATCH = 32, 10, 128


def teacher() -> nn.Module:
    """A fixed random network that produces the labels, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).requires_grad_(False)


def batches(steps: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """The data of a rank. All ranks need equally many batches, because every step needs all ranks."""
    labels_of = teacher()
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = (torch.randn(BATCH, FEATURES, generator=generator) for _ in range(steps))
    return [(x, labels_of(x).argmax(dim=1)) for x in inputs]


def main() -> None:
    """Train, and print how many bytes were sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    net = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    model = DDP(net)
    opt = thinwire.Birder(model.parameters(), lr=1e-3, weight_decay=0.01)
    thinwire.attach(model, opt)  # DDP no longer averages; thinwire sends bits while backward runs
    # Every step moves every element by lr, whatever its gradient. Only a falling lr lets training settle.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)

    for step, (inputs, labels) in enumerate(batches(steps, rank)):
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if rank == 0 and (step % 50 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}")

    if rank == 0:
        sent = opt.metrics().bytes_sent / steps
        dense = 2 * (world_size - 1) / world_size * 4 * sum(p.numel() for p in net.parameters())
        print(f"sent {sent:,.0f} bytes per step; an all-reduce of fp32 gradients sends {dense:,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
