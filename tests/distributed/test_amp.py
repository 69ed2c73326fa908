"""torch.amp.GradScaler: gradients are unscaled before they are averaged over time, and ranks skip together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import digest, run_nodes
from tests.harness import run_ranks_expecting_errors

STEPS = 6
OVERFLOW_AT = 3


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(batch).square().mean()


def _train(
    rank: int, world_size: int, *, scaled: bool, attached: bool, overflow: bool = False
) -> tuple[str, int, float]:
    torch.manual_seed(0)
    net = nn.Linear(20, 70)
    model = DDP(net) if attached else net
    opt = thinwire.Birder(model.parameters(), lr=1e-2)
    # A power of two, so that scaling changes no bit of a gradient.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    if isinstance(model, DDP):
        thinwire.attach(model, opt, grad_scaler=scaler if scaled else None)
    for step in range(STEPS):
        loss = _loss(model, rank, step)
        if overflow and step == OVERFLOW_AT and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return digest(net.parameters()), opt.metrics().skipped_steps, scaler.get_scale()


def _train_all_ways(rank: int, world_size: int) -> list[str]:
    return [
        _train(rank, world_size, scaled=scaled, attached=attached)[0]
        for scaled in (False, True)
        for attached in (False, True)
    ]


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
def test_a_scaler_changes_no_bit(nodes: int, ranks: int) -> None:
    for digests in run_nodes(_train_all_ways, nodes, ranks):
        assert len(set(digests)) == 1


def _overflow(rank: int, world_size: int, attached: bool) -> tuple[str, int, float]:
    return _train(rank, world_size, scaled=True, attached=attached, overflow=True)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
def test_an_overflow_on_one_rank_is_skipped_by_all_and_nobody_waits(nodes: int, ranks: int, attached: bool) -> None:
    results = run_nodes(_overflow, nodes, ranks, attached)
    assert [skipped for _, skipped, _ in results] == [1] * nodes * ranks
    assert len({parameters for parameters, _, _ in results}) == 1


def _attach_without_the_scaler(rank: int, world_size: int) -> None:
    model = DDP(nn.Linear(20, 70))
    opt = thinwire.Birder(model.parameters())
    thinwire.attach(model, opt)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(_loss(model, rank, 0)).backward()
    scaler.step(opt)


def test_a_scaler_that_attach_does_not_know_is_refused_on_every_rank() -> None:
    for raised in run_ranks_expecting_errors(_attach_without_the_scaler, 2):
        assert raised.type_name == "RuntimeError"
        assert "grad_scaler=scaler" in raised.message
