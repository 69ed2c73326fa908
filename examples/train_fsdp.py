"""FSDP2 on two replicas: with AdamW, replicas exchange gradients of 4 bits per value; with Birder, one bit.

torchrun --nproc-per-node 4 examples/train_fsdp.py [--optimizer birder]
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import thinwire

REPLICAS, FEATURES, WIDTH, CLASSES, BATCH = 2, 32, 256, 10, 128


class Block(nn.Module):
    """A residual layer. Each one is sharded as a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return x + F.relu(self.linear(self.norm(x)))


def teacher() -> nn.Module:
    """A fixed random network that produces the labels, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).requires_grad_(False)


def main() -> None:
    """Train, and print how many bytes a rank sent to the other replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", choices=["adamw", "birder"], default="adamw")
    arguments = parser.parse_args()
    steps, own = arguments.steps, arguments.optimizer == "birder"

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    labels_of, generator = teacher(), torch.Generator().manual_seed(1 + rank)

    mesh = init_device_mesh("cpu", (REPLICAS, world_size // REPLICAS), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES))
    for part in model:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # In both cases torch no longer averages over the replicas.
    if own:
        opt = exchange = thinwire.Birder(model.parameters(), lr=1e-3, mesh=mesh, clip_value=1.0)
        thinwire.attach(model, opt)
    else:
        exchange = thinwire.compress(model, "int4")
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(steps):
        inputs = torch.randn(BATCH, FEATURES, generator=generator)
        loss = F.cross_entropy(model(inputs), labels_of(inputs).argmax(dim=1))
        loss.backward()
        if not own:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if rank == 0 and (step % 20 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}")

    if rank == 0:
        sent = exchange.metrics().bytes_sent / steps
        shard = sum(p.numel() for p in model.parameters()) * REPLICAS / world_size
        dense = 2 * (REPLICAS - 1) / REPLICAS * 4 * shard
        print(f"sent {sent:,.0f} bytes per step; an all-reduce of fp32 gradients sends {dense:,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
