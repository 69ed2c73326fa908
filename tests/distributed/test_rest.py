"""One bit has no zero, and still: what has no gradient does not move, and what lost it comes to rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.common import WORLD_SIZES
from tests.harness import run_ranks

TOUCHED_ROWS = 6
WIDTH = 16
DEAD_COLUMN = 3


class Sparse(nn.Module):
    """An embedding with rows narrower than a word, and a layer whose input column 3 is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layer = nn.Linear(WIDTH, 5)
        self.never_used = nn.Parameter(torch.randn(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        columns = torch.ones(WIDTH)
        columns[DEAD_COLUMN] = 0
        return self.layer(self.embedding(tokens) * columns)


def train_sparse(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Sparse()
    optimizer = thinwire.Birder(net.parameters(), lr=0.01, weight_decay=0.5, **options)
    generator = torch.Generator().manual_seed(rank)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(40):
        tokens = torch.randint(0, TOUCHED_ROWS, (8,), generator=generator)
        net(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.stack([start[name], p.detach()]) for name, p in net.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"downlink": "votes"}], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_never_had_a_gradient_keeps_its_value(world_size: int, options: dict[str, Any]) -> None:
    for seen in run_ranks(train_sparse, world_size, options):
        start, end = seen["embedding.weight"]
        columns = np.arange(WIDTH) != DEAD_COLUMN
        np.testing.assert_array_equal(end[TOUCHED_ROWS:], start[TOUCHED_ROWS:])
        np.testing.assert_array_equal(end[:, DEAD_COLUMN], start[:, DEAD_COLUMN])
        assert np.all(end[:TOUCHED_ROWS, columns] != start[:TOUCHED_ROWS, columns])
        start, end = seen["layer.weight"]
        np.testing.assert_array_equal(end[:, DEAD_COLUMN], start[:, DEAD_COLUMN])
        assert np.all(end[:, columns] != start[:, columns])
        np.testing.assert_array_equal(*seen["never_used"])


def stop_gradients(rank: int, world_size: int, options: dict[str, Any]) -> np.ndarray:
    """300 coordinates over five words; every third loses its gradient at step 50. Values after each of 500 steps."""
    p = nn.Parameter(torch.ones(300))
    # The paper's rule, whose b forgets in a hundred steps.
    optimizer = thinwire.Birder([p], 1e-3, 0.8, weight_decay=0.1, beta_b=None, **options)
    stopped = torch.arange(300) % 3 == 0
    generator = torch.Generator().manual_seed(rank)
    history = []
    for step in range(500):
        gradient = torch.randn(300, generator=generator)
        p.grad = torch.where(stopped, 0.0, gradient) if step >= 50 else gradient
        optimizer.step()
        history.append(p.detach().numpy().copy())
    return np.stack(history)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"downlink": "votes"}], ids=str)
def test_a_coordinate_whose_gradient_stopped_comes_to_rest(options: dict[str, Any]) -> None:
    for history in run_ranks(stop_gradients, 2, options):
        stopped = np.arange(300) % 3 == 0
        last = history[-100:]
        assert np.all(last[:, stopped] == last[0, stopped])
        assert np.all(np.ptp(last[:, ~stopped], axis=0) > 0)
        assert np.all(np.ptp(history[:50, stopped], axis=0) > 0)
