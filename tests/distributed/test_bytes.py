"""Law 5: bytes on the wire are what the optimizer says, counted at the interface of a network of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.harness import loopback_bytes_sent, private_network, run_ranks
from thinwire.testbed import TestbedUnavailable

PARAMETERS = 1_000_000
WARM_UP, STEPS = 3, 10


def interface_total() -> int:
    """Read on every rank between two barriers: nobody sends meanwhile."""
    dist.barrier()
    total = loopback_bytes_sent()
    dist.barrier()
    return total


def measure(rank: int, world_size: int, attached: bool, options: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(500, 1000), nn.ReLU(), nn.Linear(1000, 500))
    model: nn.Module = net
    optimizer = thinwire.Birder(net.parameters(), **options)
    if attached:
        model = DistributedDataParallel(net)
        thinwire.attach(model, optimizer)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(2, 500)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(WARM_UP)
    before, wire_before = optimizer.metrics(), interface_total()
    train(STEPS)
    wire = interface_total() - wire_before
    metrics = optimizer.metrics()
    return {
        "wire": wire,
        "sent": metrics.bytes_sent - before.bytes_sent,
        "node_sent": metrics.node_bytes_sent - before.node_bytes_sent,
        "received": metrics.bytes_received - before.bytes_received,
        "elements": sum(p.numel() for p in net.parameters()),
    }


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("downlink", ["bit", "votes"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_interface_counts_what_metrics_says(world_size: int, downlink: str, attached: bool) -> None:
    try:
        with private_network() as network:
            ranks = run_ranks(measure, world_size, attached, {"downlink": downlink}, network=network)
    except TestbedUnavailable as error:
        pytest.skip(str(error))
    claimed = sum(rank["sent"] for rank in ranks)
    assert 1.00 <= ranks[0]["wire"] / claimed <= 1.10
    assert claimed == sum(rank["received"] for rank in ranks)


@pytest.mark.parametrize("downlink", ["bit", "majority"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_sends_one_bit_up_and_one_down(world_size: int, downlink: str) -> None:
    for rank in run_ranks(measure, world_size, False, {"downlink": downlink}):
        assert rank["elements"] >= PARAMETERS
        theory = 2 * (world_size - 1) / world_size * rank["elements"] / 8
        if world_size == 1:
            assert rank["sent"] == 0
        else:
            assert 1.0 <= rank["sent"] / STEPS / theory <= 1.01
