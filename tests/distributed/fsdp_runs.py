"""Runs of `thinwire.compress` in FSDP2: a small transformer, and one training loop in which everything may vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.distributed.common import digest
from tests.harness import plain

VOCABULARY, WIDTH, BLOCKS = 29, 16, 3


class Block(nn.Module):
    """Attention and a perceptron. The width of the latter is odd, so that its shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        """With two shards, the second one is empty."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.gain * self.down(torch.tanh(self.up(self.norm2(x))))


class BlockWithoutKeyBias(Block):
    """Attention does not depend on a bias of the keys. Its gradient is rounding error, and zero on some machines."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedReentrant(Block):
    """Backward runs another backward for each block."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Transformer(nn.Module):
    """The root has parameters of its own, and one that is never used."""

    def __init__(self, block: Callable[[], nn.Module], *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        if tied:
            self.head.weight = self.embedding.weight
        self.skipped: int | None = None
        """The block that forward leaves out."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, rank: int, batch: int) -> Tensor:
    """Sequences in which each token follows from the one before it."""
    draw = torch.Generator().manual_seed(1000 * rank + batch)
    tokens = [torch.randint(0, VOCABULARY, (4,), generator=draw)]
    for _ in range(8):
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    sequence = torch.stack(tokens, dim=1)
    logits = model(sequence[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), sequence[:, 1:].flatten())


def backward_once(model: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()


def accumulate_without_reduction(model: Any, rank: int, step: int) -> None:
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 10 * step).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, rank, 10 * step + 1).backward()


@dataclass(frozen=True)
class FsdpRun:
    """A run. `compressor` None is FSDP2 without thinwire."""

    compressor: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    block: Callable[[], nn.Module] = Block
    tied: bool = False
    prepare: Callable[[Any], None] | None = None
    """Called before `fully_shard`."""
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool = True
    placement: Callable[[nn.Parameter], Shard] | None = None
    """The dimension along which each parameter is sharded; None for the first."""
    configure: Callable[[Any], None] | None = None
    """Called after `thinwire.compress`."""
    backward: Callable[[Any, int, int], None] = backward_once
    steps: int = 3
    lr: float = 1e-2


def mesh_of(world_size: int, replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def transformer(block: Callable[[], nn.Module] = Block, *, tied: bool = False) -> Transformer:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Transformer(block, tied=tied)


def sharded(mesh: DeviceMesh, run: FsdpRun | None = None) -> Any:
    """A model of which every block is a group of its own, and the root another."""
    run = run or FsdpRun()
    model = transformer(run.block, tied=run.tied)
    if run.prepare is not None:
        run.prepare(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": run.policy,
        "reshard_after_forward": run.reshard_after_forward,
    }
    if run.placement is not None:
        options["shard_placement_fn"] = run.placement
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def locals_of(tensors: Any) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().to_local().clone() for tensor in tensors]


def average_options(run: FsdpRun) -> dict[str, Any]:
    """Several buckets, and replicas compared in every step."""
    return {"bucket_mb": 0.002, "check_replicas_every": 1, **run.options}


@dataclass
class Record:
    """What a rank has after the steps of a run: its shards, as arrays, and the norms of all gradients."""

    grads: list[list[Any]]
    norms: list[float]
    params: list[Any]
    digest: str
    """Of all gradients and parameters."""


def train(rank: int, mesh: DeviceMesh, run: FsdpRun) -> Record:
    model = sharded(mesh, run)
    if run.compressor is not None:
        thinwire.compress(model, run.compressor, **average_options(run))
    if run.configure is not None:
        run.configure(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    grads, norms = [], []
    for step in range(run.steps):
        run.backward(model, rank, step)
        grads.append(locals_of(p.grad for p in model.parameters()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    params = locals_of(model.parameters())
    everything = [tensor for each in (*grads, params) for tensor in each if tensor is not None]
    return Record(plain(grads), norms, plain(params), digest(everything))
