"""Runs of `thinwire.compress`: one training loop in which everything may vary, with and without DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest, environment, token_loss, token_net
from tests.instruction_sets import instruction_set_restored
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of


@dataclass(frozen=True)
class Averaging:
    """A run. Two that differ only in `ddp` or `environment` must agree to the bit."""

    compressor: str = "int4"
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = token_net
    loss: Callable[[nn.Module, int, int], torch.Tensor] = token_loss
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    lr: float = 1e-2
    steps: int = 6
    microbatches: Sequence[int] = (1,)
    """How many backward passes a step has, in turn."""
    ddp: Mapping[str, Any] | None = None
    """Arguments of DDP; None for a loop without DDP that gives gradients to an averager."""
    bucket_mb: float | None = 0.01
    environment: Mapping[str, str] = field(default_factory=dict)


class PlainLoop:
    """Averages `.grad` after backward, as DDP with a communication hook does, but without DDP."""

    def __init__(self, net: nn.Module, run: Averaging) -> None:
        self._params = [p for p in net.parameters() if p.requires_grad]
        self.averager = GradientAverager(self._params, rule_of(run.compressor, run.options), bucket_mb=run.bucket_mb)

    def average(self) -> None:
        self.averager.begin()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        vectors = [grad.contiguous().view(-1) for grad in grads]
        for p, vector in zip(self._params, vectors, strict=True):
            self.averager.add(p, vector, present=p.grad is not None)
        self.averager.finish()
        for p, vector in zip(self._params, vectors, strict=True):
            p.grad = vector.view_as(p).clone()


Record = tuple[str, str]
"""After a step, the digests of all averaged gradients and of all parameters."""


@contextmanager
def settings(run: Averaging) -> Iterator[None]:
    with environment(run.environment), instruction_set_restored():
        yield


def train(rank: int, world_size: int, run: Averaging) -> list[Record]:
    """What a rank has after each step."""
    net = run.model()
    with settings(run):
        plain = PlainLoop(net, run) if run.ddp is None else None
        ddp = None if run.ddp is None else DistributedDataParallel(net, **run.ddp)
        if ddp is not None:
            thinwire.compress(ddp, run.compressor, bucket_mb=run.bucket_mb, **run.options)
        optimizer = run.optimizer(net.parameters(), lr=run.lr)
        records = []
        for step in range(run.steps):
            passes = run.microbatches[step % len(run.microbatches)]
            for micro in range(passes):
                last = micro == passes - 1
                guard: AbstractContextManager[Any] = nullcontext() if ddp is None or last else ddp.no_sync()
                with guard:
                    run.loss(ddp or net, rank, 10 * step + micro).backward()
            if plain is not None:
                plain.average()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
            optimizer.step()
            records.append((digest(grads), digest(net.parameters())))
            optimizer.zero_grad()
    return records


def train_each(rank: int, world_size: int, runs: Sequence[Averaging]) -> list[list[Record]]:
    """One run after another in the same processes."""
    return [train(rank, world_size, run) for run in runs]
