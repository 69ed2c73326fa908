"""Distributed Lion against its oracle: the same decisions at every step and element, flat and hierarchical."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire
from tests.distributed.common import run_nodes
from tests.distributed.scenarios import (
    Scenario,
    mean_of_node,
    noisy,
    partly_absent,
    rows_untouched,
    sometimes_nonfinite,
    stop_and_return,
)
from tests.oracles.distributed_lion import DistributedLionOracle
from tests.oracles.flat_space import Group

SCENARIOS = {
    "majority": Scenario(noisy),
    "votes": Scenario(noisy, options={"downlink": "votes"}),
    "other betas, ascending": Scenario(noisy, options={"betas": (0.5, 0.8), "maximize": True}),
    "partly absent": Scenario(partly_absent),
    "rows untouched, many buckets": Scenario(rows_untouched, options={"bucket_mb": 0.0005}),
    "sometimes not finite": Scenario(sometimes_nonfinite),
    # With β2 = 0.5 the update falls below the threshold 40 steps after the last gradient, and is refreshed away.
    "stop and return": Scenario(stop_and_return, steps=290, shapes=(((7, 9), (70,)),), options={"betas": (0.5, 0.5)}),
}


def run_all(rank: int, world_size: int) -> dict[str, list[Any]]:
    """For each scenario the parameters after every step, and the number of skipped steps."""
    return {name: run(rank, world_size, scenario) for name, scenario in SCENARIOS.items()}


def run(rank: int, world_size: int, scenario: Scenario) -> list[Any]:
    (values,) = scenario.starting_values()
    params = [torch.nn.Parameter(torch.as_tensor(value)) for value in values]
    optimizer = thinwire.DistributedLion(params, lr=0.01, weight_decay=0.1, topology="auto", **scenario.options)
    after = []
    for step in range(1, scenario.steps + 1):
        for p, gradient in zip(params, scenario.gradients_at(step, rank, world_size), strict=True):
            p.grad = None if gradient is None else torch.as_tensor(gradient)
        optimizer.step()
        after.append([p.detach().clone() for p in params])
    return [after, optimizer.metrics().skipped_steps]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 1), (3, 1), (2, 2)], ids=["1", "2", "3", "2x2"])
def test_run_equals_the_oracle(nodes: int, ranks: int) -> None:
    results = run_nodes(run_all, nodes, ranks, timeout=120.0)
    for name, scenario in SCENARIOS.items():
        (values,) = scenario.starting_values()
        options = {key: value for key, value in scenario.options.items() if key != "bucket_mb"}
        oracle = DistributedLionOracle([Group(values, 0.01, 0.1)], nodes, **options)
        skipped = 0
        for step in range(1, scenario.steps + 1):
            of_ranks = [scenario.gradients_at(step, rank, nodes * ranks) for rank in range(nodes * ranks)]
            means = [mean_of_node(of_ranks[first : first + ranks]) for first in range(0, nodes * ranks, ranks)]
            skipped += not oracle.step(means)
            for index, p in enumerate(oracle.parameters):
                for rank, of_rank in enumerate(results):
                    after = of_rank[name][0][step - 1][index]
                    where = f"{name}, step {step}, parameter {index}, rank {rank}"
                    np.testing.assert_allclose(after, p.value, rtol=1e-5, atol=1e-5, err_msg=where)
        assert [of_rank[name][1] for of_rank in results] == [skipped] * len(results)
