"""DeMo on real ranks under DistributedDataParallel: equal to the NumPy oracle, and its bytes to the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.harness import run_ranks
from tests.oracles.demo import Demo

SHAPES = ((240, 256), (36_864,))
"""24 chunks: whole ones for the shards of two ranks, and of three."""
SETTINGS = {"lr": 2.0**-7, "weight_decay": 0.5}
BETA, K, STEPS = 0.75, 32, 4


class Weights(nn.Module):
    """Has the gradients that it is given."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=draw) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.weights, gradients, strict=True))  # type: ignore[return-value]


def gradients_of(rank: int, step: int) -> list[Tensor]:
    """Waves that all ranks have in common, and noise."""
    common, own = (torch.Generator().manual_seed(100 * step + seed) for seed in (99, rank))
    return [
        torch.randn(shape, generator=common).cumsum(-1) / 16 + torch.randn(shape, generator=own) for shape in SHAPES
    ]


def demo(rank: int, world_size: int) -> dict[str, Any]:
    model = DistributedDataParallel(Weights())
    compression = thinwire.compress(model, "dct_topk", k=K, residual_decay=BETA, bucket_mb=1.0)
    opt = thinwire.SignSGD(model.parameters(), **SETTINGS)
    params = []
    for step in range(STEPS):
        opt.zero_grad()
        model(gradients_of(rank, step)).backward()
        opt.step()
        params.append([p.detach().clone() for p in model.parameters()])
    return {"params": params, "sent": compression.metrics().bytes_sent}


@pytest.mark.parametrize("workers", [2, 3])
def test_ranks_follow_the_oracle(workers: int) -> None:
    of_ranks = run_ranks(demo, workers)
    oracle = Demo([p.detach().numpy() for p in Weights().parameters()], workers, K, beta=BETA, **SETTINGS)
    for step in range(STEPS):
        oracle.step([[g.numpy() for g in gradients_of(rank, step)] for rank in range(workers)])
        for rank in range(workers):
            for index, (found, expected) in enumerate(zip(of_ranks[rank]["params"][step], oracle.params, strict=True)):
                where = f"step {step}, rank {rank}, parameter {index}"
                np.testing.assert_array_equal(found, expected, err_msg=where)
    elements = sum(p.numel() for p in Weights().parameters())
    formula = STEPS * 2 * (workers - 1) / workers * elements * (20 * K + 32) / 4096 / 8
    # To each other rank a packet, an answer and a commit message, each with a header, presence bits and padding.
    beside = STEPS * 3 * (workers - 1) * 64
    assert formula <= of_ranks[0]["sent"] <= formula + beside
