"""1-bit LAMB where a layer is not like others: without momentum, without elements, with one; and within its limits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.common import digest, run_nodes, token_loss, token_net
from tests.distributed.stages import FREEZE, LOCAL_STEPS, STAGES, make, noise, parameters
from tests.harness import run_ranks

LAST = 25
each_grid = pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])


def state_of(optimizer: torch.optim.Optimizer, p: torch.Tensor, name: str) -> float:
    return float(optimizer.state[p][name])


# A layer without momentum at the switch ------------------------------------------------------------------------------


LAYERS = ((13, 7), (70,), (40,), (5, 5))


def gradient(layer: int, rank: int, step: int) -> torch.Tensor:
    silent = step == FREEZE if layer == 1 else layer == 2 and step <= FREEZE
    return (0.0 if silent else 10.0**-layer) * noise(LAYERS[layer], rank, step, layer)


def weights_by_the_page(workers: int) -> list[float]:
    """Those of layers of one size, whose variance counts a tenth where there is no momentum."""
    sizes = []
    for layer in range(len(LAYERS)):
        means = [
            np.mean([gradient(layer, rank, step).numpy() for rank in range(workers)], axis=0)
            for step in range(1, FREEZE + 1)
        ]
        v = sum(0.1 * 0.9 ** (FREEZE - step) * mean**2 for step, mean in enumerate(means, 1)) / (1 - 0.9**FREEZE)
        sizes.append(max(np.sqrt(np.mean(means[-1] ** 2)), 0.1 * np.sqrt(np.mean(v))))
    some = [size for size in sizes if size > 0]
    return [min(max(np.mean(some) / size, 1e-3), 1e3) if size > 0 else 1.0 for size in sizes]


def momenta_at_the_switch(rank: int, world_size: int) -> dict[str, Any]:
    """With beta1 = 0 the momentum is the last gradient: 0 for the second layer, and the third never had one."""
    params = parameters(*LAYERS)
    optimizer = make("OneBitLamb", params, betas=(0.0, 0.9), weight_decay=0.1)
    values = []
    for step in range(1, LAST + 1):
        for i, p in enumerate(params):
            p.grad = gradient(i, rank, step)
        optimizer.step()
        values.append([p.detach().clone() for p in params])
    return {"values": values, "weights": [state_of(optimizer, p, "weight") for p in params]}


@each_grid
def test_a_layer_without_momentum_at_the_switch_goes_on(nodes: int, ranks: int) -> None:
    expected = weights_by_the_page(nodes * ranks)
    results = run_nodes(momenta_at_the_switch, nodes, ranks)
    for seen in results:
        np.testing.assert_allclose(seen["weights"], expected, rtol=1e-5)
        start = parameters(*LAYERS)
        np.testing.assert_array_equal(seen["values"][-1][2], start[2].detach().numpy())
        for before, after in pairwise(seen["values"][FREEZE - 1 :]):
            for i in (0, 1, 3):
                assert np.isfinite(after[i]).all()
                assert (before[i] != after[i]).all()
                assert np.abs(after[i] - before[i]).max() < 1.0
        for layer, first in zip(seen["values"][-1], results[0]["values"][-1], strict=True):
            np.testing.assert_array_equal(layer, first)


# Layers of no and of one element -------------------------------------------------------------------------------------

SIZES = {
    "empty first": ((0,), (70,), (9, 8)),
    "empty last": ((70,), (3, 0, 2)),
    "scalars alone": ((), (1,), (1, 1)),
    "all of them": ((0,), (), (130,), (2, 0), (1,)),
    "empty alone": ((0,),),
}


def train_sizes(rank: int, name: str, sizes: str) -> list[list[torch.Tensor]]:
    """Up to ZeroOneAdam's first local step; the last values are those after synchronize()."""
    params = parameters(*SIZES[sizes])
    optimizer = make(name, params, bucket_mb=0.001)
    values = [[p.detach().clone() for p in params]]
    for step in range(1, LOCAL_STEPS[0] + 1):
        for i, p in enumerate(params):
            p.grad = noise(tuple(p.shape), rank, step, i)
        optimizer.step()
        values.append([p.detach().clone() for p in params])
    optimizer.synchronize()
    values.append([p.detach().clone() for p in params])
    return values


def train_all_sizes(rank: int, world_size: int) -> dict[tuple[str, str], list[list[torch.Tensor]]]:
    return {(name, sizes): train_sizes(rank, name, sizes) for name in STAGES for sizes in SIZES}


@each_grid
def test_empty_tensors_and_scalars(nodes: int, ranks: int) -> None:
    """Of all four: what works for 1-bit LAMB's norms and averages should not fail elsewhere."""
    results = run_nodes(train_all_sizes, nodes, ranks)
    for case, steps in results[0].items():
        for before, after in pairwise(steps[:-1]):
            for old, new in zip(before, after, strict=True):
                assert np.isfinite(new).all(), case
                assert (old != new).all(), case
        for other in results[1:]:
            for ours, theirs in zip(other[case][-1], steps[-1], strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=str(case))


# Limits --------------------------------------------------------------------------------------------------------------

LIMITS = {"factor_min": 0.6, "factor_max": 1.7, "factor_threshold": 0.05}


def factors(rank: int, world_size: int, size_afterwards: float, options: dict[str, float]) -> list[list[float]]:
    """Those of two layers after every step; gradients change their size after the switch."""
    params = parameters((13, 7), (70,))
    optimizer = make("OneBitLamb", params, weight_decay=0.1, **options)
    seen = []
    for step in range(1, FREEZE + 61):
        for i, p in enumerate(params):
            p.grad = (1.0 if step <= FREEZE else size_afterwards) * noise(tuple(p.shape), rank, step, i)
        optimizer.step()
        seen.append([state_of(optimizer, p, "factor") for p in params])
    return seen


@pytest.mark.parametrize(("size_afterwards", "reached"), [(30.0, "factor_min"), (0.03, "factor_max")])
def test_factors_stay_within_their_limits(size_afterwards: float, reached: str) -> None:
    """f follows the ratio of the frozen variance to the present one, slowly, up to a limit."""
    for seen in run_ranks(factors, 2, size_afterwards, LIMITS):
        of_layers = np.array(seen).T
        np.testing.assert_array_equal(of_layers[:, :FREEZE], 1.0)
        assert (of_layers >= LIMITS["factor_min"]).all()
        assert (of_layers <= LIMITS["factor_max"]).all()
        change = of_layers[:, 1:] / of_layers[:, :-1]
        threshold = LIMITS["factor_threshold"]
        assert (change >= 1 - threshold - 1e-9).all()
        assert (change <= 1 + threshold + 1e-9).all()
        assert (np.abs(change - 1) > threshold - 1e-9).any(), "it never wanted to change by more"
        np.testing.assert_allclose(of_layers[:, -1], LIMITS[reached])


def test_a_threshold_of_zero_is_no_factor() -> None:
    for seen in run_ranks(factors, 2, 0.03, {"factor_threshold": 0.0}):
        assert {factor for of_step in seen for factor in of_step} == {1.0}


def train_from_zero(rank: int, world_size: int) -> list[tuple[torch.Tensor, float]]:
    """A bias of zeros has no size to go by: its factor is 1, with which max_coeff=1 agrees."""
    bias, weight = nn.Parameter(torch.zeros(70)), nn.Parameter(3 * noise((9, 8), 5))
    optimizer = make("OneBitLamb", [bias, weight], max_coeff=1.0, min_coeff=1.0)
    seen = []
    for step in range(1, LAST + 1):
        bias.grad, weight.grad = noise((70,), rank, step), noise((9, 8), rank, step, 1)
        optimizer.step()
        seen.append((torch.cat([bias.detach(), weight.detach().reshape(-1)]), state_of(optimizer, bias, "coefficient")))
    return seen


def test_coefficients_of_exactly_1_move_layers_in_every_stage() -> None:
    for seen in run_ranks(train_from_zero, 2):
        for (before, _), (after, _) in pairwise(seen):
            assert (before != after).all()
        assert [coefficient for _, coefficient in seen[FREEZE:]] == pytest.approx([1.0] * (LAST - FREEZE))


# Kinds of numbers ----------------------------------------------------------------------------------------------------


def train_low(rank: int, world_size: int, error_dtype: torch.dtype) -> tuple[list[str], list[float]]:
    net = token_net(torch.bfloat16)
    optimizer = make("OneBitLamb", net.parameters(), lr=0.01, error_dtype=error_dtype)
    digests, losses = [], []
    for _ in range(LAST):
        loss = token_loss(net, rank, 0)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(net.parameters()))
    return digests, losses


@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_trains_bfloat16_parameters(error_dtype: torch.dtype) -> None:
    (digests, _), *others = results = run_ranks(train_low, 2, error_dtype)
    assert len(set(digests)) == LAST
    assert all(other == digests for other, _ in others)
    for _, losses in results:
        at_the_switch = losses[FREEZE]
        assert at_the_switch < 0.9 * losses[0]
        assert losses[-1] < 0.8 * at_the_switch
