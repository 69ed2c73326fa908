"""Runs of thinwire's optimizers on FSDP2 parameters: attached, in `step()`, and by hand on the local shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import thinwire
from tests.distributed.fsdp_runs import FsdpRun, backward_once, sharded
from thinwire.optimizers.optimizer import WireOptimizer

SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1


def shard_seed(seed: int, shard: int) -> int:
    """The seed of a shard, as docs/protocol.md defines it."""
    key = 0
    for value in (seed, 4, shard):
        key = (key + value + SPLITMIX[0]) & MASK
        key = ((key ^ key >> 30) * SPLITMIX[1]) & MASK
        key = ((key ^ key >> 27) * SPLITMIX[2]) & MASK
        key ^= key >> 31
    return key >> 1 if shard else seed


@dataclass(frozen=True)
class HsdpRun:
    """A run. Every block of the model is a group of its own."""

    optimizer: Callable[..., WireOptimizer] = thinwire.Birder
    options: Mapping[str, Any] = field(default_factory=dict)
    model: FsdpRun = field(default_factory=FsdpRun)
    backward: Callable[[Any, int, int], None] = backward_once
    replicas: int = 2
    steps: int = 4
    overlap: bool = True


def options_of(run: HsdpRun) -> dict[str, Any]:
    """Several buckets, and replicas compared in every step."""
    return {"lr": 3e-3, "bucket_mb": 0.002, "check_replicas_every": 1, **run.options}


def build(mesh: DeviceMesh, run: HsdpRun) -> tuple[Any, WireOptimizer]:
    """A model and its attached optimizer."""
    model = sharded(mesh, run.model)
    optimizer = run.optimizer(model.parameters(), mesh=mesh, **options_of(run))
    thinwire.attach(model, optimizer, overlap=run.overlap)
    return model, optimizer


def advance(model: Any, optimizer: WireOptimizer, rank: int, run: HsdpRun, steps: range) -> None:
    for step in steps:
        run.backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def shards_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def by_hand(rank: int, mesh: DeviceMesh, run: HsdpRun) -> tuple[list[Tensor], WireOptimizer]:
    """The same without `mesh=` and `attach`: FSDP2 inside of each replica, the local shards as ordinary parameters, and
    the replicate group as process group."""
    model = sharded(mesh["shard"], run.model)
    own = [nn.Parameter(p.detach().to_local().clone()) for p in model.parameters()]
    options = options_of(run)
    if "seed" in options:
        options["seed"] = shard_seed(options["seed"], mesh.get_local_rank(1))
    optimizer = run.optimizer(own, process_group=mesh.get_group(0), topology="flat", **options)
    for step in range(run.steps):
        run.backward(model, rank, step)
        for mine, p in zip(own, model.parameters(), strict=True):
            mine.grad = None if p.grad is None else p.grad.to_local().clone()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for mine, p in zip(own, model.parameters(), strict=True):
                p.to_local().copy_(mine)
    return [p.detach().clone() for p in own], optimizer
