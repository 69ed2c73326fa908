"""Every kind of parameter a model may have, and the parts of the loop around the optimizer.

With gradients of a constant sign nothing is random: ``u`` is ±1, every worker votes alike, and a coordinate moves by
exactly the learning rate against its gradient. An element that is mistaken for another one shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.distributed.common import digest, environment
from tests.harness import run_ranks
from thinwire.compressors.stochastic_sign import Downlink


def signs_like(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(salt)
    return (torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1).to(tensor.dtype)


def channels_last() -> torch.Tensor:
    return torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "0-dim": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0),
    "empty with shape": lambda: torch.randn(3, 0, 2),
    "one element": lambda: torch.randn(1, 1),
    "just over a word": lambda: torch.randn(65),
    "contiguous": lambda: torch.randn(13, 17),
    "transposed": lambda: torch.randn(13, 17).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "every second column": lambda: torch.randn(9, 14)[:, ::2],
    "channels_last": channels_last,
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "expanded storage offset": lambda: torch.randn(300)[100:200],
}


def move_every_kind(rank: int, world_size: int, kernels: str, downlink: Downlink) -> dict[str, list[torch.Tensor]]:
    """Three steps; the gradient's memory order changes from step to step while its values do not."""
    torch.manual_seed(0)
    parameters = {kind: nn.Parameter(make()) for kind, make in KINDS.items()}
    starts = {kind: p.detach().clone() for kind, p in parameters.items()}
    with environment({"THINWIRE_KERNELS": kernels}):
        optimizer = thinwire.Birder(parameters.values(), lr=0.25, weight_decay=0.0, bucket_mb=0.002, downlink=downlink)
    for step in range(3):
        for salt, p in enumerate(parameters.values()):
            gradient = signs_like(p, salt)
            if p.dim() == 4 and step == 1:
                gradient = gradient.to(memory_format=torch.channels_last)
            if p.dim() == 2 and step == 2:
                gradient = gradient.t().contiguous().t()
            p.grad = gradient
        optimizer.step()
    return {
        kind: [starts[kind], p.detach(), signs_like(p, salt), optimizer.state[p]["m"]]
        for salt, (kind, p) in enumerate(parameters.items())
    }


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("downlink", ["bit", "majority", "votes"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_kind_moves_against_its_own_gradient(world_size: int, downlink: Downlink, kernels: str) -> None:
    for seen in run_ranks(move_every_kind, world_size, kernels, downlink):
        for kind, (start, end, sign, m) in seen.items():
            np.testing.assert_allclose(end, start - 3 * 0.25 * sign, rtol=1e-6, atol=1e-6, err_msg=kind)
            np.testing.assert_allclose(m, (1 - 0.7**3) * sign, rtol=1e-6, err_msg=f"m of {kind}")


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
def test_low_precision_moves_by_steps_below_its_resolution(dtype_name: str) -> None:
    for end, master in run_ranks(tiny_steps, 2, dtype_name):
        np.testing.assert_allclose(master, 1 - 200 * 1e-4, rtol=1e-4)
        np.testing.assert_allclose(end, 1 - 200 * 1e-4, rtol=2.0**-8)
        assert np.all(end < 1)


def tiny_steps(rank: int, world_size: int, dtype_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """1e-4 from 1.0 is far below half a unit in the last place of either type."""
    p = nn.Parameter(torch.ones(70, dtype=getattr(torch, dtype_name)))
    optimizer = thinwire.Birder([p], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["master"].dtype == torch.float32
    assert torch.equal(optimizer.state[p]["master"].to(p.dtype), p)
    return p.detach(), optimizer.state[p]["master"]


def test_weights_loaded_into_low_precision_parameters_reach_the_master() -> None:
    p = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = thinwire.Birder([p], lr=0.25, weight_decay=0.0)
    with torch.no_grad():
        p.fill_(3.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((10,), 2.75, dtype=torch.bfloat16))


def test_zero_grad_both_ways() -> None:
    """Zeros are a gradient: momentum goes on. None is none: the parameter stays, as in torch.optim."""
    moved = {}
    for set_to_none in (True, False):
        p = nn.Parameter(torch.ones(10))
        optimizer = thinwire.Birder([p], lr=0.25, weight_decay=0.0)
        p.grad = torch.ones(10)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (p.grad is None) == set_to_none
        optimizer.step()
        moved[set_to_none] = p.detach().clone()
    assert torch.equal(moved[True], torch.full((10,), 0.75))
    assert torch.equal(moved[False], torch.full((10,), 0.5))


def test_a_scheduler_sets_the_step() -> None:
    p = nn.Parameter(torch.zeros(5))
    optimizer = thinwire.Birder([p], lr=1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    positions = []
    for _ in range(6):
        p.grad = torch.ones(5)
        optimizer.step()
        scheduler.step()
        positions.append(p.detach()[0].item())
    assert positions == [-1.0, -2.0, -2.5, -3.0, -3.25, -3.5]


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = thinwire.Birder([p], lr=0.25, weight_decay=0.0)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 5.0
    assert calls == 1
    assert torch.equal(p.detach(), torch.full((5,), 0.75))


def test_groups_have_their_own_rate_and_decay() -> None:
    fast, slow = nn.Parameter(torch.full((70,), 2.0)), nn.Parameter(torch.full((3,), 2.0))
    optimizer = thinwire.Birder(
        [{"params": [fast], "lr": 0.5, "weight_decay": 0.5}, {"params": [slow]}], lr=0.125, weight_decay=0.0
    )
    for p in (fast, slow):
        p.grad = -torch.ones_like(p)
    optimizer.step()
    assert torch.equal(fast.detach(), torch.full((70,), 2.0 * 0.75 + 0.5))
    assert torch.equal(slow.detach(), torch.full((3,), 2.125))


def test_maximize_climbs() -> None:
    p = nn.Parameter(torch.zeros(5))
    optimizer = thinwire.Birder([p], lr=0.25, maximize=True)
    p.grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((5,), 0.25))


def test_frozen_parameters_take_no_part() -> None:
    frozen, trained = nn.Parameter(torch.ones(5), requires_grad=False), nn.Parameter(torch.ones(5))
    optimizer = thinwire.Birder([frozen, trained], lr=0.25, weight_decay=0.5)
    trained.grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(frozen.detach(), torch.ones(5))
    assert not torch.equal(trained.detach(), torch.ones(5))


def test_a_group_can_be_added_until_the_first_step() -> None:
    first, second = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(70))
    optimizer = thinwire.Birder([first], lr=0.25)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    first.grad, second.grad = torch.ones(5), torch.ones(70)
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((5,), -0.25))
    assert torch.equal(second.detach(), torch.full((70,), -0.5))
    with pytest.raises(RuntimeError, match="add_param_group after the first step"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def train_in(rank: int, world_size: int, members: list[int]) -> list[str] | None:
    """Only `members` train; the others have nothing to do with it and must not be waited for."""
    group: Any = dist.new_group(members)
    if rank not in members:
        return None
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(500))
    optimizer = thinwire.Birder([p], lr=0.01, process_group=group, seed=5)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    digests = []
    for _ in range(5):
        p.grad = torch.randn(500, generator=generator)
        optimizer.step()
        digests.append(digest([p]))
    return digests


def test_a_process_group_of_some_ranks() -> None:
    """Workers are numbered within the group: three of four train as three of three do."""
    idle, *busy = run_ranks(train_in, 4, [1, 2, 3])
    assert idle is None
    assert busy == run_ranks(train_in, 3, [0, 1, 2])
