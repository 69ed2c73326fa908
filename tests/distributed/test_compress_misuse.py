"""`thinwire.compress`: what cannot be done is refused on every rank; loss scales change no bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import digest, run_nodes, token_loss, token_net
from tests.harness import run_ranks_expecting_errors


def unknown_name(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(token_net()), "int5")


def unknown_name_on_one_rank(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(token_net()), "int5" if rank else "int4")


def unknown_option(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(token_net()), "int4", blocks=32)


def wrong_block(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(token_net()), "int4", block=48)


def other_compressors(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(token_net()), "int8" if rank else "int4")


def other_options(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(token_net()), "int4", block=32 if rank else 64)


def other_models(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    with torch.no_grad():
        model.module.get_parameter("scale").add_(rank)
    thinwire.compress(model)


def no_ddp(rank: int, world_size: int) -> None:
    thinwire.compress(token_net())


def two_hooks(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    model.register_comm_hook(None, allreduce_hook)
    thinwire.compress(model)


def compress_twice(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    thinwire.compress(model)
    thinwire.compress(model)


def attach_first(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    thinwire.attach(model, thinwire.Birder(model.parameters()))
    thinwire.compress(model)


def attach_afterwards(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    _ = thinwire.compress(model)
    thinwire.attach(model, thinwire.Birder(model.parameters()))


def wire_optimizer_without_attach(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    _ = thinwire.compress(model)
    optimizer = thinwire.Birder(model.parameters())
    token_loss(model, rank, 0).backward()
    optimizer.step()


def sparse(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(nn.Sequential(nn.Embedding(9, 9, sparse=True))))


def complex_parameter(rank: int, world_size: int) -> None:
    thinwire.compress(DDP(nn.Linear(3, 3, dtype=torch.complex64)))


def join(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    _ = thinwire.compress(model)
    with model.join():
        token_loss(model, rank, 0).backward()


def after_close(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    thinwire.compress(model).close()
    token_loss(model, rank, 0).backward()


@pytest.mark.parametrize(
    ("attempt", "type_name", "message"),
    [
        (unknown_name, "ValueError", r"compressor='int5': expected one of int4, .*Did you mean 'int\d'\?"),
        (unknown_name_on_one_rank, "ValueError", r"rank 1: compressor='int5'"),
        (unknown_option, "TypeError", r"'int4' has no option 'blocks': its options are block, error_feedback"),
        (wrong_block, "ValueError", r"block=48: expected 16, 32 or 64"),
        (other_compressors, "RuntimeError", r"ranks disagree on the compressor: 'int4' on rank 0; 'int8' on rank 1"),
        (other_options, "RuntimeError", r"ranks disagree on block: 64 on rank 0; 32 on rank 1"),
        (other_models, "RuntimeError", r"ranks disagree on the checksum of the values of parameter 0"),
        (no_ddp, "TypeError", r"model is TokenNet, expected .*DistributedDataParallel"),
        (two_hooks, "RuntimeError", r"communication hook already \(allreduce_hook\)"),
        (compress_twice, "RuntimeError", r"communication hook already .*call compress once"),
        (attach_first, "RuntimeError", r"It is attached to a thinwire optimizer"),
        (attach_afterwards, "RuntimeError", r"attach: .*thinwire\.compress averages its gradients"),
        (wire_optimizer_without_attach, "RuntimeError", r"thinwire\.compress averages the gradients of a parameter"),
        (sparse, "TypeError", r"'0' is Embedding\(sparse=True\)"),
        (complex_parameter, "TypeError", r"a parameter of torch\.complex64"),
        (join, "RuntimeError", r"join\(\) on a model after thinwire\.compress"),
        (after_close, "RuntimeError", r"is closed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_refused_on_every_rank(attempt: Callable[[int, int], None], type_name: str, message: str) -> None:
    for error in run_ranks_expecting_errors(attempt, 2):
        assert error.type_name == type_name, error.message
        assert re.search(message, error.message, re.DOTALL), error.message


# Loss scales ----------------------------------------------------------------------------------------------------------


def scaled(rank: int, world_size: int, overflow: bool) -> tuple[list[str], float]:
    """The gradients of each step, unscaled; the scale doubles after every second step."""
    torch.manual_seed(0)
    net = nn.Linear(20, 70)
    model = DDP(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    _ = thinwire.compress(model, grad_scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    digests = []
    for step in range(6):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(batch).square().mean()
        scaler.scale(loss * math.inf if overflow and rank == 1 and step == 3 else loss).backward()
        scaler.unscale_(optimizer)
        digests.append(digest(p.grad for p in net.parameters() if p.grad is not None))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return digests, scaler.get_scale()


def unscaled(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    net = nn.Linear(20, 70)
    model = DDP(net)
    _ = thinwire.compress(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    digests = []
    for step in range(6):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        model(batch).square().mean().backward()
        digests.append(digest(p.grad for p in net.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return digests


def with_and_without(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    return unscaled(rank, world_size), scaled(rank, world_size, overflow=False)[0]


def test_a_loss_scale_that_changes_changes_no_bit() -> None:
    for without, scaled_run in run_nodes(with_and_without, 2, 1):
        assert without == scaled_run


def test_an_overflow_on_one_rank_lowers_the_scale_on_all() -> None:
    outcomes = run_nodes(scaled, 2, 1, True)
    assert outcomes[0] == outcomes[1]
    # Two doublings, one of them before the overflow at step 3, which halves it.
    assert outcomes[0][1] == 1024.0 * 2 / 2 * 2
