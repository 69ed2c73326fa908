"""What cannot be done is refused, by name and before anything is sent; where ranks must agree, by every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import token_loss, token_net
from tests.harness import run_ranks, run_ranks_expecting_errors


def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, **kwargs))


# The constructor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"lr=-0\.1: expected a number >= 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"beta": 1.0}, r"beta=1\.0: expected a number in \[0, 1\)"),
        ({"beta": -0.1}, r"beta=-0\.1"),
        ({"beta_b": 1.0}, r"beta_b=1\.0: expected a number in \[0, 1\), or None for beta"),
        ({"beta_b": -0.5}, r"beta_b=-0\.5"),
        ({"gain": 0.0}, r"gain=0\.0: expected a number > 0"),
        ({"gain": float("inf")}, r"gain=inf"),
        ({"eps": -1e-9}, "eps=-1e-09: expected a number >= 0"),
        ({"weight_decay": -1.0}, r"weight_decay=-1\.0"),
        ({"downlink": "fax"}, "downlink='fax': expected 'bit', 'majority' or 'votes'"),
        ({"bucket_mb": 0.0}, r"bucket_mb=0\.0: expected a positive number"),
        ({"seed": -1}, "seed=-1: expected an integer"),
        ({"seed": 1.5}, r"seed=1\.5: expected an integer"),
        ({"state_dtype": torch.float16}, r"state_dtype=torch\.float16: expected torch\.float32 or torch\.bfloat16"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thinwire.Birder([parameter(3)], **options)


def test_arguments_of_a_group() -> None:
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        thinwire.Birder([{"params": [parameter(3)], "lr": -1.0}])


def test_a_forgotten_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2, but torch\.distributed is not initialised: call"):
        thinwire.Birder([parameter(3)])


def test_complex_parameters() -> None:
    with pytest.raises(TypeError, match=r"a parameter of torch\.complex64: .*view_as_real"):
        thinwire.Birder([parameter(3, dtype=torch.complex64)])


def test_double_parameters() -> None:
    with pytest.raises(TypeError, match=r"a parameter of torch\.float64: expected float32, bfloat16 or float16"):
        thinwire.Birder([parameter(3, dtype=torch.float64)])


def test_mixed_devices() -> None:
    with pytest.raises(ValueError, match="parameters on devices cpu, meta"):
        thinwire.Birder([parameter(3), parameter(3, device="meta")])


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = thinwire.Birder(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(TypeError, match=r"torch\.sparse_coo.*sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    assert optimizer.metrics().steps == 0


def not_a_member(rank: int, world_size: int) -> str:
    group: Any = dist.new_group([1])
    try:
        thinwire.Birder([parameter(3)], process_group=group)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "accepted"


def test_a_process_group_without_this_rank() -> None:
    outsider, member = run_ranks(not_a_member, 2)
    assert "process_group" in outsider
    assert member == "accepted"


# Packets -------------------------------------------------------------------------------------------------------------


def out_of_step(rank: int, world_size: int, elements: int) -> None:
    """The ranks agree, and then rank 1 falls behind the others by a step."""
    p = parameter(elements)
    optimizer = thinwire.Birder([p], bucket_mb=0.005)
    p.grad = torch.ones(elements)
    optimizer.step()
    optimizer.step()
    if rank == 1:
        optimizer.state[p]["step"] -= 1
        optimizer._begin_step()
    optimizer.step()


@pytest.mark.parametrize("elements", [100, 50_000], ids=["one bucket", "many buckets"])
def test_a_rank_that_is_a_step_behind_stops_all(elements: int) -> None:
    """Whoever refuses the first bucket has others under way, and its peers hear of it instead of losing it."""
    errors = run_ranks_expecting_errors(out_of_step, 3, elements)
    assert all(error.type_name == "CorruptPacket" for error in errors)
    assert "packet from rank 1 for step 3, bucket 0: step is 2, expected 3" in errors[0].message
    assert "packet from rank 0 for step 2, bucket 0: step is 3, expected 2" in errors[1].message


# attach: agreement ---------------------------------------------------------------------------------------------------


def differ_in_seed(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"seed": 5 if rank == 1 else 0}


def differ_in_lr(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"lr": 0.5 if rank == 1 else 0.25}


def differ_in_beta(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"beta": 0.5 if rank == 1 else 0.25}


def differ_in_eps(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"eps": 0.5 if rank == 1 else 0.25}


def differ_in_downlink(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"downlink": "votes" if rank == 1 else "bit"}


def differ_in_amsgrad(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"amsgrad": rank == 1}


def differ_in_bucket_size(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3), {"bucket_mb": 2.0 if rank == 1 else 1.0}


def differ_in_shape(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3 + rank % 2), {}


def differ_in_dtype(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3, dtype=torch.bfloat16 if rank == 1 else torch.float32), {}


def differ_in_name(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.ModuleDict({"left" if rank == 1 else "right": nn.Linear(3, 3)}), {}


def differ_in_number(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 3, bias=rank != 1), {}


DISAGREEMENTS: dict[str, tuple[Callable[[int], tuple[nn.Module, dict[str, Any]]], str]] = {
    "seed": (differ_in_seed, "seed: 0 on ranks 0, 2; 5 on rank 1"),
    "lr": (differ_in_lr, "lr of parameter group 0: 0.25 on ranks 0, 2; 0.5 on rank 1"),
    "beta": (differ_in_beta, "beta of parameter group 0: 0.25 on ranks 0, 2; 0.5 on rank 1"),
    "eps": (differ_in_eps, "eps: 0.25 on ranks 0, 2; 0.5 on rank 1"),
    "downlink": (differ_in_downlink, "downlink: 'bit' on ranks 0, 2; 'votes' on rank 1"),
    "amsgrad": (differ_in_amsgrad, "amsgrad: False on ranks 0, 2; True on rank 1"),
    "bucket_mb": (differ_in_bucket_size, "bucket_mb: 1.0 on ranks 0, 2; 2.0 on rank 1"),
    "shape": (differ_in_shape, "parameter 0: "),
    "dtype": (differ_in_dtype, "parameter 0: "),
    "name": (differ_in_name, "parameter 0: "),
    "number": (differ_in_number, "the number of parameters: 2 on ranks 0, 2; 1 on rank 1"),
}


def attach_disagreeing(rank: int, world_size: int, name: str) -> None:
    module, options = DISAGREEMENTS[name][0](rank)
    # DDP's own verification of shapes would get in first: give it a module that is alike, then the real one.
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.module = module
    thinwire.attach(model, thinwire.Birder(module.parameters(), **options))


def step_disagreeing(rank: int, world_size: int, name: str) -> None:
    module, options = DISAGREEMENTS[name][0](rank)
    optimizer = thinwire.Birder(module.parameters(), **options)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_attach_names_the_field_and_the_ranks_on_every_rank(name: str) -> None:
    for error in run_ranks_expecting_errors(attach_disagreeing, 3, name):
        assert error.type_name == "RuntimeError"
        assert f"ranks disagree on {DISAGREEMENTS[name][1]}" in error.message
        assert "on ranks 0, 2" in error.message
        assert "on rank 1" in error.message


@pytest.mark.parametrize("name", [name for name in DISAGREEMENTS if name != "name"])
def test_without_attach_the_first_step_does(name: str) -> None:
    """Only names are unknown to a step without attach."""
    for error in run_ranks_expecting_errors(step_disagreeing, 3, name):
        assert f"ranks disagree on {DISAGREEMENTS[name][1]}" in error.message


# attach: what it cannot do -------------------------------------------------------------------------------------------


def attached(rank: int, **options: Any) -> tuple[DistributedDataParallel, thinwire.Birder]:
    net = token_net()
    model = DistributedDataParallel(net)
    optimizer = thinwire.Birder(net.parameters())
    thinwire.attach(model, optimizer, **options)
    return model, optimizer


def attach_twice(rank: int, world_size: int) -> None:
    thinwire.attach(*attached(rank))


def attach_beside_a_hook(rank: int, world_size: int) -> None:
    net = token_net()
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, allreduce_hook)
    thinwire.attach(model, thinwire.Birder(net.parameters()))


def attach_no_module(rank: int, world_size: int) -> None:
    thinwire.attach([token_net()], thinwire.Birder(token_net().parameters()))  # pyright: ignore[reportArgumentType]


def attach_another_module(rank: int, world_size: int) -> None:
    thinwire.attach(token_net(), thinwire.Birder(token_net().parameters()))


def attach_other_optimizer(rank: int, world_size: int) -> None:
    net = token_net()
    optimizer: Any = torch.optim.AdamW(net.parameters())
    thinwire.attach(DistributedDataParallel(net), optimizer)


def attach_some_parameters(rank: int, world_size: int) -> None:
    net = token_net()
    held = [p for name, p in net.named_parameters() if name != "hidden.bias"]
    thinwire.attach(DistributedDataParallel(net), thinwire.Birder(held))


def attach_other_group(rank: int, world_size: int) -> None:
    net = token_net()
    alone: Any = [dist.new_group([r]) for r in range(world_size)][rank]
    thinwire.attach(DistributedDataParallel(net), thinwire.Birder(net.parameters(), process_group=alone))


def join_the_model(rank: int, world_size: int) -> None:
    model, _ = attached(rank)
    with model.join():
        token_loss(model, rank, 0).backward()


def join_from_outside(rank: int, world_size: int) -> None:
    model, _ = attached(rank)
    with Join([model]):
        token_loss(model, rank, 0).backward()


def backward_once_more_than_before(rank: int, world_size: int) -> None:
    model, optimizer = attached(rank)
    for backwards in (1, 1, 2):
        for micro in range(backwards):
            token_loss(model, rank, micro).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("attempt", "type_name", "message"),
    [
        (attach_twice, "RuntimeError", r"has a communication hook already .*attach once"),
        (attach_beside_a_hook, "RuntimeError", r"has a communication hook already \(allreduce_hook\)"),
        (attach_no_module, "TypeError", r"model is list, expected .*DistributedDataParallel"),
        (attach_another_module, "ValueError", r"holds no parameter of the model \(TokenNet\)"),
        (attach_other_optimizer, "TypeError", r"optimizer is .*AdamW, expected a thinwire optimizer"),
        (attach_some_parameters, "ValueError", r"does not hold parameter 'hidden\.bias'"),
        (attach_other_group, "ValueError", r"process group has ranks \[0, 1\], the optimizer's \[\d\]"),
        (join_the_model, "RuntimeError", r"join\(\) on a model after thinwire.attach: .*equally many batches"),
        (join_from_outside, "RuntimeError", r"join\(\) on a model after thinwire.attach"),
        (
            backward_once_more_than_before,
            "RuntimeError",
            r"got a gradient 2 times since the last step, but 1 times before.*no_sync\(\)",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_refused_on_every_rank(attempt: Callable[[int, int], None], type_name: str, message: str) -> None:
    for error in run_ranks_expecting_errors(attempt, 2):
        assert error.type_name == type_name
        assert re.search(message, error.message, re.DOTALL), error.message
