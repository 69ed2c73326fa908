"""A rank that trains and then leaves as programs do, with its process group still there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

_alive: list[object] = []
"""What a program keeps in its main module until the interpreter takes it apart."""


def train_and_leave(rank: int, world_size: int, kind: str) -> str:
    """Take some steps of DDP with torch's AdamW, or attached to one of thinwire's optimizers."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    if kind == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        wire = getattr(thinwire, kind.split(",")[0])(model.parameters(), delay=int("delayed" in kind))
        thinwire.attach(model, wire)
        optimizer = wire
    for _ in range(6):
        model(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if "no group" in kind:
        dist.destroy_process_group()  # with an exchange in flight
    _alive.extend([model, optimizer])
    return "done"
